"""What a forward leaves for the backward of a segment beside its values: nodes in both graphs, in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.streaming.differentiate import reached_backward
from l2l_compile.passes.streaming.place_stash import stash_inputs


def may_run_backward(compilation: Compilation) -> list[Segment]:
    """The segments of this rank that run backward if every output has its gradient. What forward leaves is the same for each set of them."""
    outputs = zip(compilation.outputs, compilation.gradients.differentiable, strict=True)
    reached = reached_backward(compilation.segments, [value for value, wanted in outputs if value is not None and wanted])
    return [segment for segment in reached if compilation.stages.runs(segment)]


def keep(forward: fx.Graph, run: fx.Node, value: str, word: Callable[..., Any], source: fx.Node | None = None) -> None:
    """Have forward leave something of a segment behind its run: `word` reads `source`, or else the results of the run."""
    segment = nodes.operands(run).segment
    with forward.inserting_after(run):
        kept = forward.call_function(word, (segment, source or run))
    kept.meta.update(segment=segment, value=value)
    outputs, stashes, writes = nodes.returned(forward)
    forward.output_node().args = ((outputs, (*stashes, kept), writes),)


def take(backward: fx.Graph, name: str, value: str, kind: str, host: bool) -> fx.Node:
    """A placeholder for what forward has left, behind those of the stashes. A segment may read parameters alone, and stash nothing."""
    stashed = stash_inputs(backward)
    place = backward.inserting_after(stashed[-1]) if stashed else backward.inserting_before(next(iter(backward.nodes)))
    with place:
        taken = backward.placeholder(name)
    taken.target = taken.name
    taken.meta.update(segment=None, kind=kind, host=host, value=value)
    return taken
