"""The call that a rule sees: its arguments, their shapes in both traces, and where their rows stand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from l2l_compile.passes.batching.batch_rules.states import Kind, Mixing, Partial, ResultState, RowIds, Rows, ValueState, each

USES_BATCH_AS_NUMBER = "uses the size of the batch as a number"
COMPUTES_WITH_ROW_IDS = "computes with the number of a row"
DIFFERENT_DIMENSIONS = "combines rows that stand in different dimensions"


# Sums in narrower dtypes would be rounded once per micro-batch. Sums of integers wrap as the sum over the whole batch does.
PARTIAL_SUM_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.int32})


class Refused(Exception):
    """Raised by a rule if a call mixes rows, or if independence of rows cannot be shown. The message is one clause."""


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
    state: ValueState

    @property
    def rows(self) -> Rows | None:
        """Where its rows stand; None if it is invariant. For rules for rows: the walk gives them no other states."""
        return cast("Rows | None", self.state)

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
class BatchSizes:
    """The sizes of the batch that the graph is traced at."""

    small: int
    large: int

    def multiple_of(self, number: object) -> int | None:
        """The `m` for a varying number that is `m` times the batch size in both traces; None for any other number."""
        if not isinstance(number, Varying):
            return None
        multiple, rest = divmod(number.small, self.small)
        return multiple if not rest and multiple > 0 and number.large == multiple * self.large else None

    def rows_in(self, sizes: Sequence[tuple[int, int]]) -> Rows | None:
        """Finds the batch dimension from the sizes in the two traces; None if no size depends on the batch.

        Raises Refused if two dimensions depend on the batch, or if the size of the one dimension is no multiple of the batch.
        """
        varying = [dim for dim, (small, large) in enumerate(sizes) if small != large]
        if not varying:
            return None
        if len(varying) > 1:
            raise Refused("has the batch in two dimensions of its result")
        multiple = self.multiple_of(Varying(*sizes[varying[0]]))
        if multiple is None:
            raise Refused("makes a size that is no multiple of the batch")
        return Rows(varying[0], multiple)


@dataclass(frozen=True)
class Call:
    """One operation of the graph, as both traces call it.

    arguments   by schema name: `TracedValue`, lists of `TracedValue` or None, `Varying`, or an equal constant
    small_out   the result in the smaller trace: a tensor, or several
    sum_dtypes  the dtypes in which sums over the batch may be taken in parts
    """

    op: Any
    arguments: dict[str, Any]
    small_out: Any
    large_out: Any
    batch: BatchSizes
    sum_dtypes: frozenset[torch.dtype] = PARTIAL_SUM_DTYPES

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    # ---- for the walk ------------------------------------------------------------------------------------------------

    @cached_property
    def mixing(self) -> Mixing | None:
        """The first argument that could not be proven row-wise; None if there is none."""
        items = (item for argument in self.arguments.values() for item in flattened(argument))
        states = (item.state if isinstance(item, TracedValue) else item for item in items)
        return next((state for state in states if isinstance(state, Mixing)), None)

    @cached_property
    def states(self) -> list[ValueState]:
        """The states of its tensor arguments."""
        return [value.state for value in self.values()]

    @cached_property
    def varying(self) -> set[str]:
        """The names of the arguments that hold a number that was computed from the size of the batch."""
        return {
            name for name, argument in self.arguments.items() if any(isinstance(item, Varying) for item in flattened(argument))
        }

    @property
    def reads_batch(self) -> bool:
        """Whether any argument depends on the batch."""
        return bool(self.varying) or any(state is not None for state in self.states)

    def reads(self, kind: Kind) -> bool:
        """Whether any argument is of this kind."""
        return any(state is not None and state.kind is kind for state in self.states)

    @property
    def reads_row_ids(self) -> bool:
        return any(isinstance(state, RowIds) for state in self.states)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(self.op, "tags", ())

    # ---- for rules ---------------------------------------------------------------------------------------------------

    def values(self) -> Iterator[TracedValue]:
        """Every tensor argument, including the tensors in lists."""
        return (item for argument in self.arguments.values() for item in flattened(argument) if isinstance(item, TracedValue))

    def rows(self, name: str) -> Rows | None:
        """Where the rows of a tensor argument stand; None when it is invariant or was not given."""
        value = self[name]
        return value.rows if isinstance(value, TracedValue) else None

    def batched(self, name: str = "self") -> tuple[TracedValue, Rows]:
        """A tensor argument that has to be batched, and where its rows stand. Raises Refused if it is not batched."""
        value = self[name]
        if not isinstance(value, TracedValue) or value.rows is None:
            raise Refused("reads rows where it needs a value that every row shares")
        return value, value.rows

    def invariant(self, *names: str) -> None:
        """Refuses the call if one of these arguments is batched."""
        for name in names:
            if self.rows(name) is not None:
                raise Refused(f"takes rows of the batch as its {name!r}")

    def each(self, state: ValueState) -> ResultState:
        """The same state for every result."""
        return each(state, self.small_out)

    def partial(self, how: str, why: str) -> Partial:
        """The state of a result that adds rows up, if the sum may be taken in parts; raises Refused(why) if not."""
        if self.small_out.dtype not in self.sum_dtypes:
            raise Refused(why)
        return Partial(how)

    @property
    def out_sizes(self) -> list[tuple[int, int]]:
        """Sizes of a single result in the two traces."""
        return list(zip(self.small_out.shape, self.large_out.shape, strict=True))

    def batch_in_result(self, equal_entries: bool = False) -> Rows | None:
        """The dimension of a single result whose size is a multiple of the batch; None if no size depends on it."""
        rows = self.batch.rows_in(self.out_sizes)
        return None if rows is None else replace(rows, equal_entries=equal_entries)


def equal(a: Any, b: Any) -> bool:
    """Whether two constants have the same type and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        real = not any(isinstance(t, torch._subclasses.FakeTensor) or is_functorch_wrapped_tensor(t) for t in (a, b))
        return real and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def flattened(argument: Any) -> Sequence[Any]:
    """The items of an argument that is a list; otherwise the argument alone, in a tuple."""
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def dims(argument: Any, ndim: int) -> list[int]:
    """A `dim` argument (int, list, or None and [] for all) as non-negative dimensions."""
    if argument is None or argument == []:
        return list(range(ndim))
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [dim % ndim if ndim else 0 for dim in listed]


def aligned(value: TracedValue, ndim: int) -> Rows | None:
    """Where the rows of `value` stand once it is broadcast, from the right, to `ndim` dimensions."""
    rows = value.rows
    return None if rows is None else rows.at(rows.dim + ndim - value.ndim)


def agree(places: Sequence[Rows | None]) -> Rows:
    """The place where the rows of all batched values stand; raises Refused if places differ. At least one value is batched."""
    return cast("Rows", agree_if_any(places))


def agree_if_any(places: Sequence[Rows | None]) -> Rows | None:
    """The same as `agree`, but None if no value is batched."""
    batched = [place for place in places if place is not None]
    certain = {place for place in batched if not place.equal_entries} or set(batched)
    if len(certain) > 1 or any((p.dim, p.factor) != (c.dim, c.factor) for p in batched for c in certain):
        raise Refused(DIFFERENT_DIMENSIONS)
    return next(iter(certain), None)
