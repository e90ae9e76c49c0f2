"""Decide which blocks run micro-batch by micro-batch (`proof`), and number the versions of the values that blocks write into.

A write into an operand makes a new version of the value, and later segments read this version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Input
from l2l_compile.ir.graph import memory_of, share_memory
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.passes.batching.proof import prove_block
from l2l_compile.passes.compilation import Compilation, Fact


@dataclass(frozen=True)
class ProveRowIndependence:
    """Provides `batching`: `Block.inner_looped`, `Block.reason`, `Block.mutated` and versions of values."""

    name: ClassVar[str] = "prove_row_independence"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BATCHING})

    def apply(self, compilation: Compilation) -> None:
        captured = compilation.captured
        for block in compilation.blocks:
            if block.inner_looped is None:
                prove_block(compilation, block)
        rows = captured.hints.get(captured.batch, 1)
        for segment in compilation.segments:
            if segment.block.inner_looped:
                segment.micro_batches = min(compilation.options.micro_batches, rows)
                for value, spec in zip(segment.outputs, segment.block.outputs, strict=False):
                    captured.specs[value.node] = replace(
                        captured.specs[value.node], partial=spec.partial, equal_rows=spec.equal_rows
                    )
        _version_values(compilation)


def _version_values(compilation: Compilation) -> None:
    """A segment that writes into a value makes a new version of it, and later segments read this version.

    Raises `L2LError` if a reader would have to see the write through another value that shares the memory, or if another
    segment reads a weight that is written into.
    """
    segments = compilation.segments
    current: dict[Value, Value] = {}
    sharing = _by_memory(compilation)
    for segment in segments:
        segment.values = tuple(current.get(v, v) for v in segment.values)
        made = []
        for index in segment.block.mutated:
            is_weight = index < len(segment.weights)
            node = segment.weights[index].node if is_weight else segment.values[index - len(segment.weights)].node
            _check_names(compilation, segment, node, sharing.get(memory_of(node), []))
            new = Value(node, current.get(Value(node), Value(node)).version + 1)
            if is_weight:
                _check_alone(compilation, segment, segment.weights[index])
            else:
                current[Value(node)] = new
            made.append(new)
        segment.outputs = (*segment.outputs, *made)


def _by_memory(compilation: Compilation) -> dict[int | None, list[fx.Node]]:
    """The inputs of the graph, its weights and the outputs of segments, grouped by their memory."""
    found: dict[int | None, list[fx.Node]] = {}
    made = [v.node for segment in compilation.segments for v in segment.outputs]
    for node in dict.fromkeys([*(i.node for i in compilation.captured.inputs), *compilation.sequence.weights, *made]):
        found.setdefault(memory_of(node), []).append(node)
    return found


def _check_names(compilation: Compilation, writer: Segment, written: fx.Node, sharing: list[fx.Node]) -> None:
    """Raise `L2LError` if another value that shares the memory of `written` is read later or belongs to the user.

    Outputs of the writing segment may share the memory.
    """
    others = [n for n in sharing if n not in {v.node for v in writer.outputs} and share_memory(n, written)]
    if not others:
        return
    read = {v.node for s in compilation.segments[writer.index :] for v in s.values}  # the writer may read it after the write
    read |= {w.node for s in compilation.segments[writer.index :] for w in s.weights}
    seen_by_user = {*compilation.captured.outputs, *(i.node for i in compilation.captured.inputs)}
    for other in filter((read | seen_by_user).__contains__, others):
        raise L2LError(
            f"segment '{writer.name}' writes in place into '{_name(compilation, written)}', whose memory "
            f"'{_name(compilation, other)}' shares, which is read as well. Write into a copy (x = x.clone()), or use the "
            "operation that is not in place"
        )


def _check_alone(compilation: Compilation, writer: Segment, weight: Input) -> None:
    """Raise `L2LError` if another segment reads a written weight: weights are fetched as they were before the step."""
    if any(weight.node is w.node for s in compilation.segments if s is not writer for w in s.weights):
        raise L2LError(
            f"segment '{writer.name}' writes into {weight.kind} '{weight.name}', which other segments read as well: the order of "
            "such writes cannot be kept. Write into it between the steps, or give every layer one of its own"
        )


def _name(compilation: Compilation, node: fx.Node) -> str:
    return next((i.name for i in compilation.captured.inputs if i.node is node), node.name)
