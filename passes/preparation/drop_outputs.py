"""`outputs="loss"`: drop the outputs with the batch dimension, and the operations that only they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir.captured import Captured
from l2l_compile.ir.graph import drop_dead
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.compilation import Compilation, Fact


@dataclass(frozen=True)
class DropOutputs:
    """With `outputs="loss"`, drops the outputs with the batch dimension if the graph also returns a loss."""

    name: ClassVar[str] = "drop_outputs"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, compilation: Compilation) -> None:
        if compilation.options.outputs == "loss":
            drop_outputs(compilation.captured)


def drop_outputs(captured: Captured) -> None:
    """Drop the outputs with the batch dimension, and the operations that only they need, if the graph also returns a loss.

    A loss is a differentiable output without the batch dimension. A graph that Dynamo ended early (a graph break) keeps its
    outputs, since the next graph reads them.
    """
    if captured.break_reason is not None:
        return
    specs = {
        i: captured.specs[o]
        for i, o in enumerate(captured.outputs)
        if isinstance(o, fx.Node) and o in captured.specs and o.op != "placeholder"
    }
    is_batched = _may_have_the_row if _has_one_row(captured) else _has_rows
    batched = {i: spec for i, spec in specs.items() if is_batched(spec)}
    if not any(spec.differentiable for i, spec in specs.items() if i not in batched):
        return
    captured.dropped = batched
    captured.graph.output_node().args = (tuple(None if i in batched else o for i, o in enumerate(captured.outputs)),)
    drop_dead(captured.graph)
    there = set(captured.graph.nodes)
    captured.specs = {node: spec for node, spec in captured.specs.items() if node in there}


def _has_rows(spec: TensorSpec) -> bool:
    return spec.batch is not None or spec.mixed


def _has_one_row(captured: Captured) -> bool:
    """Whether the batch has one row. A size of 1 has no symbol, so no spec shows where the rows are."""
    values = (captured.specs[i.node] for i in captured.inputs if i.kind == "value" and i.node in captured.specs)
    return captured.batch is None and any(spec.shape[:1] == (1,) for spec in values)


def _may_have_the_row(spec: TensorSpec) -> bool:
    """Whether a value may have a batch dimension, for a batch of one row. A loss of shape [1] counts as a scalar."""
    return 1 in spec.shape and any(size != 1 for size in spec.shape)
