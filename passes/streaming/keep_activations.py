"""Let forward keep what it computes inside of a segment, so that backward need not compute it again.

    %y = forward(segment, %w, (%x))        =>      %y = forward(segment, %w, (%x))
                                                   %k = keep_activations(segment, %y)      and in backward
    %g = backward(segment, %w, (%x), (...))        %g = backward(segment, %w, (%x), (...), activations=%k)

With the option `keep_on_host`, some micro-batches are kept on the host: `offload_activations` sends them there, and
`restore_activations` brings them back, as `offload` and `restore` do for values between segments.

How much a segment keeps, and where, is decided for the sizes of each step within both options (`runtime/kept_activations.py`): from
nothing, where backward computes all of it again, to all that backward reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.left_for_backward import keep, may_run_backward, take


@dataclass(frozen=True)
class KeepActivations:
    """Provides `activations_kept`."""

    name: ClassVar[str] = "keep_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PROGRAM, Fact.TURNS_WRITTEN})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_KEPT})

    def apply(self, compilation: Compilation) -> None:
        forward, backward, options = compilation.forward, compilation.backward, compilation.options
        if not options.keeps_activations or backward is None:
            return
        runs = {nodes.operands(n).segment: n for n in forward.find_nodes(op="call_function", target=nodes.forward)}
        backwards = {nodes.operands(n).segment: n for n in backward.find_nodes(op="call_function", target=nodes.backward)}
        for segment in reversed(may_run_backward(compilation)):
            index, value = segment.index, f"inside of {segment.name}"
            if options.keep != 0:
                keep(forward, runs[index], value, nodes.keep_activations)
                taken = take(backward, f"inside_{index}", value, "activations", host=False)
                if index in backwards:
                    nodes.set_operands(backwards[index], activations=taken)
            if options.keep_on_host != 0:
                keep(forward, runs[index], value, nodes.offload_activations)
                taken = take(backward, f"sent_{index}", value, "activations", host=True)
                if index in backwards:
                    nodes.set_operands(backwards[index], restored_activations=_restored(backward, backwards[index], taken, value))


def _restored(backward: fx.Graph, run: fx.Node, sent: fx.Node, value: str) -> fx.Node:
    segment = nodes.operands(run).segment
    with backward.inserting_before(run):
        restored = backward.call_function(nodes.restore_activations, (segment, sent))
    restored.meta.update(segment=segment, value=value)
    return restored
