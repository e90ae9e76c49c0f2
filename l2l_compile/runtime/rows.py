"""How the rows of a batch are divided into micro-batches, and over ranks, in one step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from l2l_compile.ir.segments import Segment, block_bindings, micro_batch_sizes
from l2l_compile.ir.values import Bindings, TensorSpec, evaluate


@dataclass(frozen=True)
class StepRows:
    """The sizes of one step.

    bindings       the values of the program's symbols
    batch          the symbol of the batch size; None if the batch cannot be split
    micro_batches  how many there are, at most
    of_ranks       the rows of each rank, if the batch is made of the rows of all ranks; else empty
    first          how many micro-batches the ranks before this one have: seeds are numbered over all ranks
    """

    bindings: Bindings
    batch: sympy.Symbol | None
    micro_batches: int
    of_ranks: tuple[int, ...] = ()
    first: int = 0

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Rows of each micro-batch; [1] for a batch that cannot be split."""
        return micro_batch_sizes(self.count, self.micro_batches) if self.batch is not None else [1]

    @property
    def count(self) -> int:
        """Rows of a batch that can be split."""
        assert self.batch is not None
        return self.bindings[self.batch]

    @property
    def is_global(self) -> bool:
        """Whether the batch is made of the rows of all ranks."""
        return bool(self.of_ranks)

    def split(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """Slices of a whole value, contiguous; views where the batch is the first dimension."""
        return [self.slice(tensor, spec, micro_batch).contiguous() for micro_batch in range(len(self.sizes))]

    def slice(self, tensor: torch.Tensor, spec: TensorSpec, micro_batch: int) -> torch.Tensor:
        """A micro-batch's slice of a whole value, a view."""
        dim, multiple = spec.rows.dim, evaluate(spec.rows.multiple, self.bindings)
        return tensor.narrow(dim, sum(self.sizes[:micro_batch]) * multiple, self.sizes[micro_batch] * multiple)

    def replicate(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """The micro-batches of a value whose rows are equal: slices of the first one, views if contiguous."""
        dim, multiple = spec.rows.dim, evaluate(spec.rows.multiple, self.bindings)
        return [tensor.narrow(dim, 0, size * multiple).contiguous() for size in self.sizes]

    def shapes(self, spec: TensorSpec, is_split: bool, turn: int | None = None) -> list[tuple[int, ...]]:
        """The shape of each micro-batch of a split value, or of that of `turn` alone; of a whole value its own."""
        if not is_split:
            return [spec.sizes(self.bindings)]
        counts = self.sizes if turn is None else [self.sizes[turn]]
        return [spec.sizes(self.bindings if self.batch is None else {**self.bindings, self.batch: count}) for count in counts]

    def partial_weight(self, micro_batch: int, partial: str | None) -> float:
        """Weight of a micro-batch's partial sum; `partial` is the field of `TensorSpec`."""
        return self.sizes[micro_batch] / (sum(self.of_ranks) or sum(self.sizes)) if partial == "mean" else 1

    def summed(self, partials: Sequence[torch.Tensor], partial: str | None) -> torch.Tensor:
        """The sum over rows, from the partial sum of each micro-batch."""
        weighted = [each * self.partial_weight(i, partial) for i, each in enumerate(partials)]
        return functools.reduce(torch.add, weighted[1:], weighted[0])

    def bindings_of(self, segment: Segment) -> list[Bindings]:
        """The sizes of each run of a segment: one per micro-batch, or the whole batch once."""
        bindings = segment.bindings(self.bindings)
        if self.is_global and not segment.block.inner_looped:
            assert self.batch is not None
            return [{**bindings, self.batch: sum(self.of_ranks)}]
        return block_bindings(segment.block, bindings, self.batch, self.micro_batches)

    def in_value(self, spec: TensorSpec) -> tuple[int, list[int]]:
        """The dimension of a value's rows, and how many entries each rank has there."""
        multiple = evaluate(spec.rows.multiple, self.bindings)
        return spec.rows.dim, [rows * multiple for rows in self.of_ranks]
