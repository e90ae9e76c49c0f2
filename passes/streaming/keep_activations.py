"""Let forward keep what it computes inside of a segment, so that backward need not compute it again.

    %y = forward(segment, %w, (%x))        =>      %y = forward(segment, %w, (%x))
                                                   %k = keep_activations(segment, %y)      and in backward
    %g = backward(segment, %w, (%x), (...))        %g = backward(segment, %w, (%x), (...), activations=%k)

How much a segment keeps is decided for the sizes of each step, within the option `keep` (`runtime/kept_activations.py`): from nothing,
where backward computes all of it again, to all that backward reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.place_stash import stash_inputs


@dataclass(frozen=True)
class KeepActivations:
    """Provides `activations_kept`."""

    name: ClassVar[str] = "keep_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PROGRAM})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_KEPT})

    def apply(self, compilation: Compilation) -> None:
        forward, backward = compilation.forward, compilation.backward
        if compilation.options.keep == 0 or backward is None:
            return
        runs = {nodes.operands(n).segment: n for n in forward.find_nodes(op="call_function", target=nodes.forward)}
        for node in backward.find_nodes(op="call_function", target=nodes.backward):
            segment = compilation.segments[nodes.operands(node).segment]
            value = f"inside of {segment.name}"
            _keep(forward, runs[segment.index], value)
            _take(backward, node, value)


def _keep(forward: fx.Graph, run: fx.Node, value: str) -> None:
    segment = nodes.operands(run).segment
    with forward.inserting_after(run):
        kept = forward.call_function(nodes.keep_activations, (segment, run))
    kept.meta.update(segment=segment, value=value)
    outputs, stashes, writes = nodes.returned(forward)
    forward.output_node().args = ((outputs, (*stashes, kept), writes),)


def _take(backward: fx.Graph, run: fx.Node, value: str) -> None:
    with backward.inserting_after(stash_inputs(backward)[-1]):
        taken = backward.placeholder(f"inside_{nodes.operands(run).segment}")
    taken.target = taken.name
    taken.meta.update(segment=None, kind="activations", host=False, value=value)
    nodes.set_operands(run, activations=taken)
