"""What a rule sees of a call: its arguments, their shapes in both traces, and where their rows stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....ir.batch import Batch


@dataclass(frozen=True)
class Mixing:
    """Why a value could not be proven row-wise."""

    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} {self.reason}"


@dataclass(frozen=True)
class RowIds:
    """An integer tensor whose entries are the number of their row: `arange(B)`, possibly broadcast."""

    dim: int


@dataclass(frozen=True)
class Partial:
    """A sum over rows, of which each micro-batch has a part; the value has no batch dimension.

    how   "sum": the parts add up. "mean": they do when each is multiplied by its micro-batch's part of the rows
    """

    how: str


USES_BATCH_AS_NUMBER = "uses the size of the batch as a number"

State = Batch | Mixing | RowIds | Partial | None


# Sums in narrower dtypes would be rounded once a micro-batch, and sums of integers wrap as those of the whole batch do.
PARTS = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.int32})


class Refused(Exception):
    """Raised by a rule: this call mixes rows, or cannot be shown not to. The message is one clause."""


@dataclass(frozen=True)
class Varying:
    """A constant that differs between the two traces: it was computed from the size of the batch."""

    small: Any
    large: Any


@dataclass(frozen=True)
class TracedValue:
    """A tensor argument."""

    small: torch.Tensor
    large: torch.Tensor
    state: State

    @property
    def ndim(self) -> int:
        return self.small.ndim

    @property
    def shape(self) -> torch.Size:
        """Sizes in the smaller trace."""
        return self.small.shape

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(size in the smaller trace, size in the larger one) of every dimension."""
        return list(zip(self.small.shape, self.large.shape, strict=True))


@dataclass(frozen=True)
class Call:
    """One op of the graph, as both traces call it."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]  # by schema name: Value, lists of Value or None, Varying, or an equal constant
    small_out: Any
    large_out: Any
    small_batch: int
    large_batch: int
    parts: frozenset[torch.dtype] = PARTS

    def part(self, how: str, why: str) -> Partial:
        """The state of a result that adds rows up, if the sum may be taken in parts; raises Refused(why) if not."""
        if self.small_out.dtype not in self.parts:
            raise Refused(why)
        return Partial(how)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def values(self) -> Iterator[TracedValue]:
        """Every tensor argument, those in lists too."""
        return (item for argument in self.arguments.values() for item in flattened(argument) if isinstance(item, TracedValue))

    def rows(self, name: str) -> Batch | None:
        """Where the rows of a tensor argument stand; None when it is invariant or was not given."""
        value = self[name]
        return value.state if isinstance(value, TracedValue) else None

    def batched(self, name: str = "self") -> tuple[TracedValue, Batch]:
        """A tensor argument that has to be batched, and where."""
        value = self[name]
        if not isinstance(value, TracedValue) or value.state is None:
            raise Refused("reads rows where it needs a value that every row shares")
        return value, value.state

    def invariant(self, *names: str) -> None:
        """Refuses the call if one of these arguments is batched."""
        for name in names:
            if self.rows(name) is not None:
                raise Refused(f"takes rows of the batch as its {name!r}")

    @property
    def out_sizes(self) -> list[tuple[int, int]]:
        """Sizes of a single result in the two traces."""
        return list(zip(self.small_out.shape, self.large_out.shape, strict=True))

    def batch_in_result(self, equal_entries: bool = False) -> Batch | None:
        """The dimension of a single result whose size is a multiple of the batch; None if no size depends on it."""
        found = batch_of_sizes(self.out_sizes, self.small_batch, self.large_batch)
        return replace(found, equal_entries=equal_entries) if found is not None else None


def flattened(argument: Any) -> Sequence[Any]:
    """The items of an argument that is a list; the argument alone if it is none."""
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def batch_of_sizes(sizes: Sequence[tuple[int, int]], small_batch: int, large_batch: int) -> Batch | None:
    """Reads the batch dimension off the sizes in the two traces.

    Raises Refused when two dimensions depend on the batch, or one that is no multiple of it.
    """
    varying = [dim for dim, (small, large) in enumerate(sizes) if small != large]
    if not varying:
        return None
    if len(varying) > 1:
        raise Refused("has the batch in two dimensions of its result")
    small, large = sizes[varying[0]]
    multiple, rest = divmod(small, small_batch)
    if rest or multiple < 1 or multiple * large_batch != large:
        raise Refused("makes a size that is no multiple of the batch")
    return Batch(varying[0], multiple)


def dims(argument: Any, ndim: int) -> list[int]:
    """A `dim` argument (int, list, or None and [] for all) as non-negative dimensions."""
    if argument is None or argument == []:
        return list(range(ndim))
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [dim % ndim if ndim else 0 for dim in listed]


def aligned(value: TracedValue, ndim: int) -> Batch | None:
    """Where the rows of `value` stand once it is broadcast, from the right, to `ndim` dimensions."""
    if value.state is None:
        return None
    return value.state.at(value.state.dim + ndim - value.ndim)


def agree(places: Sequence[Batch | None]) -> Batch | None:
    """The one place where the rows of all batched values stand; raises Refused if there are two."""
    distinct = {place for place in places if place is not None}
    certain = {place for place in places if place is not None and not place.equal_entries} or distinct
    if len(certain) > 1 or any((p.dim, p.factor) != (c.dim, c.factor) for p in distinct for c in certain):
        raise Refused("combines rows that stand in different dimensions")
    return next(iter(certain), None)
