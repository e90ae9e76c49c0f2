"""Decide which segments run backward, and which values forward must keep for them.

A segment runs backward when one of its operands wants a gradient and one of its outputs leads to an output of the
graph that can have one. It needs its value operands again to recompute, so these are stashed. Segments below the first
trainable parameter keep nothing and run no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from l2l_compile.ir.segments import Segment, Value
from l2l_compile.passes.compilation import Compilation, Fact, Gradients


@dataclass(frozen=True)
class Differentiate:
    """Provides `gradients`."""

    name: ClassVar[str] = "differentiate"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BATCHING})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS})

    def apply(self, compilation: Compilation) -> None:
        differentiable = tuple(is_differentiable(compilation, v) for v in compilation.outputs)
        everything = reached_backward(
            compilation.segments, [v for v, d in zip(compilation.outputs, differentiable, strict=True) if v is not None and d]
        )
        kept = dict.fromkeys(v for s in everything for v in s.values)
        compilation.gradients = Gradients(differentiable, tuple(kept))
        if not compilation.gradient_mask:
            compilation.gradient_mask = _predict(compilation, differentiable)


def is_differentiable(compilation: Compilation, value: Value | None) -> bool:
    """Whether an output of the graph is a tensor that takes a gradient. `value` is None for an output that is a number."""
    return value is not None and compilation.captured.specs[value.node].differentiable


def reached_backward(segments: Sequence[Segment], roots: Sequence[Value]) -> list[Segment]:
    """The segments that run backward when these values have a gradient, in program order."""
    wanted = set(roots)
    reached = []
    for segment in reversed(segments):
        if not any(v in wanted for v in segment.outputs):
            continue
        if any(spec.differentiable for spec in segment.block.operands):
            reached.append(segment)
        wanted.update(v for v, spec in zip(segment.values, segment.block.values, strict=True) if spec.differentiable)
    return reached[::-1]


def _predict(compilation: Compilation, differentiable: tuple[bool, ...]) -> tuple[bool, ...]:
    """A prediction of the outputs with a gradient, for the first print: differentiable scalars (a loss) or, if none, all."""
    scalars = tuple(
        v is not None and d and not compilation.captured.specs[v.node].shape
        for v, d in zip(compilation.outputs, differentiable, strict=True)
    )
    return scalars if any(scalars) else differentiable
