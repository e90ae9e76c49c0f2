"""Settle which blocks run micro-batch by micro-batch (`proof`), and which values their writes make.

An operand that a block writes into becomes a new version of the value, which later segments read.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ..errors import L2LError
from ..ir.program import Segment, Value
from .compilation import Compilation
from .proof import decide


@dataclass(frozen=True)
class TraceBatch:
    """Provides `batching`: `Block.inner_looped`, `Block.reason`, `Block.mutated` and versions of values."""

    name: str = "trace_batch"
    requires: frozenset[str] = frozenset({"regions"})
    provides: frozenset[str] = frozenset({"batching"})

    def apply(self, compilation: Compilation) -> None:
        captured = compilation.captured
        for block in compilation.blocks:
            if block.inner_looped is None:
                decide(compilation, block)
        rows = captured.hints.get(captured.batch, 1)
        for segment in compilation.segments:
            if segment.block.inner_looped:
                segment.micro_batches = min(compilation.options.micro_batches, rows)
                for value, spec in zip(segment.outputs, segment.block.outputs, strict=False):
                    captured.specs[value.node] = replace(captured.specs[value.node], partial=spec.partial, alike=spec.alike)
        _version_values(compilation)


def _version_values(compilation: Compilation) -> None:
    """A segment that writes into a value makes a new version of it, which later segments read.

    Raises `L2LError` where the write would have to be seen through another value that shares the memory.
    """
    segments = compilation.segments
    current: dict[Value, Value] = {}
    for segment in segments:
        segment.values = tuple(current.get(v, v) for v in segment.values)
        made = []
        for index in segment.block.mutated:
            is_weight = index < len(segment.weights)
            node = segment.weights[index].node if is_weight else segment.values[index - len(segment.weights)].node
            _check_unshared(compilation, segment, node, is_weight)
            new = Value(node, current.get(Value(node), Value(node)).version + 1)
            if not is_weight:
                current[Value(node)] = new
            made.append(new)
        segment.outputs = (*segment.outputs, *made)


def _check_unshared(compilation: Compilation, writer: Segment, written: fx.Node, is_weight: bool) -> None:
    """A write into `written` may be seen later only under its own name, or by other results of the same segment."""
    later = compilation.segments[writer.index + 1 :]
    read_later = {v.node for s in later for v in s.values} | set(compilation.captured.outputs)
    read_later |= {i.node for i in compilation.captured.inputs if i.kind == "value"}  # the user sees them
    read_later |= {v.node for v in writer.values}  # maybe after the write
    shared = [n for n in read_later if n is not written and _storage(n) == _storage(written)]
    for other in (n for n in shared if n not in {v.node for v in writer.outputs}):
        raise L2LError(
            f"segment '{writer.name}' writes in place into '{written.name}', whose memory '{other.name}' shares, which "
            "is read as well. Write into a copy (x = x.clone()), or use the operation that is not in place"
        )
    name = next((w.name for w in writer.weights if w.node is written), written.name)
    if is_weight and any(w.node is written for s in compilation.segments if s is not writer for w in s.weights):
        raise L2LError(
            f"segment '{writer.name}' writes into '{name}', which other segments read as well; the order of "
            "such writes cannot be kept. Give every layer a buffer of its own"
        )


def _storage(node) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
