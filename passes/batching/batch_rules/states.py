"""The states of values, and the questions that the walk over a graph asks them.

An invariant value, which is the same for every micro-batch, has no state: `None` stands for it. The state of a call with
several results is a tuple.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from l2l_compile.ir.batch import Batch

COUNTS = "counts something other than the rows of the batch"
MOVED = "reads entries in an order that depends on the other rows"


class Kind(enum.StrEnum):
    """Which function of a `Rule` gives the result of a call: the field of this name."""

    ROWS = "rows"
    SUMS = "sums"
    ORDERS = "orders"


class State:
    """Base of all states."""

    equal_rows: bool = False  # whether all rows are equal

    @property
    def kind(self) -> Kind:
        return Kind.ROWS

    @property
    def layout(self) -> Rows | None:
        """The rows that the sizes in both traces have to show; None if no size depends on the batch."""
        return None

    @property
    def why_internal(self) -> str | None:
        """Why the value may not leave the graph, and only operations with a rule for it may read it; None if it may."""
        return None


ValueState = State | None
ResultState = ValueState | tuple[ValueState, ...]


class SortKey:
    """The numbers by which one call of `sort` sorts entries: numbers below `upper_bound`, `factor` of them for each row."""

    def __init__(self, upper_bound: int, factor: int):
        self.upper_bound, self.factor = upper_bound, factor


# ---- rows, sums of rows, and neither ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(State):
    """The value holds the rows of the batch: dimension `dim` has `outer * B * multiple` entries for a batch of `B` rows.

    Entry `(o * B + row) * multiple + i` of that dimension belongs to `row`. With `outer` 1, the rows of a micro-batch are a
    slice, and only such a value may be handed from block to block (`Batch`). A larger `outer` comes from values of several
    layers that are joined along the batch, or from a time dimension that is folded before the batch.

    equal_entries  all entries along `dim` are equal, so any other `outer` and `multiple` with the same product describe it too
    equal_rows     all rows are equal
    upper_bound    entries are whole numbers from 0 on and below this bound; None if no bound is known
    order          the key by which each micro-batch has sorted its entries along `dim`; None if they stand row by row
    """

    dim: int
    multiple: int = 1
    outer: int = 1
    equal_entries: bool = field(default=False, compare=False)
    equal_rows: bool = field(default=False, compare=False)
    upper_bound: int | None = field(default=None, compare=False)
    order: SortKey | None = None

    @property
    def factor(self) -> int:
        """Entries of the dimension for each row."""
        return self.outer * self.multiple

    @property
    def kind(self) -> Kind:
        return Kind.ROWS if self.order is None else Kind.ORDERS

    @property
    def layout(self) -> Rows:
        return self

    @property
    def why_internal(self) -> str | None:
        return None if self.order is None else MOVED

    @classmethod
    def of(cls, batch: Batch | None) -> Rows | None:
        """The state of a value with these rows, whose multiple is a number; None for a value without rows."""
        return None if batch is None else cls(batch.dim, cast("int", batch.multiple))

    def at(self, dim: int) -> Rows:
        """The same rows in another dimension."""
        return replace(self, dim=dim)

    def bounded(self, upper_bound: int | None) -> Rows:
        """The same rows, with this bound of their entries; None if no bound is known."""
        return replace(self, upper_bound=upper_bound)

    def unequal(self) -> Rows:
        """The same rows, which may differ from each other."""
        return replace(self, equal_entries=False, equal_rows=False)

    def __str__(self) -> str:
        outer = f"{self.outer} x " if self.outer != 1 else ""
        return f"{outer}{Batch(self.dim, self.multiple)}"


@dataclass(frozen=True)
class Partial(State):
    """A sum over rows, of which each micro-batch has a part; the value has no batch dimension.

    how   "sum": the parts add up to the value. "mean": they do after each is multiplied by its micro-batch's share of the rows
    """

    how: str

    @property
    def kind(self) -> Kind:
        return Kind.SUMS


@dataclass(frozen=True)
class Mixing(State):
    """The value could not be proven row-wise: the operation that decided this, and the reason."""

    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} {self.reason}"


@dataclass(frozen=True)
class RowIds(State):
    """An integer tensor whose entries are the number of their row: `arange(B)`, possibly broadcast."""

    dim: int

    @property
    def layout(self) -> Rows:
        return Rows(self.dim)

    @property
    def why_internal(self) -> str:
        return "numbers the rows of the batch"


# ---- entries that are sorted and put back: see `orders.py` -----------------------------------------------------------


class OrderState(State):
    """Base of the states that only the rules of `orders.py` read."""

    @property
    def kind(self) -> Kind:
        return Kind.ORDERS

    @property
    def why_internal(self) -> str:
        return MOVED


@dataclass(frozen=True)
class Sorted(OrderState):
    """The numbers themselves, sorted."""

    key: SortKey

    @property
    def layout(self) -> Rows:
        return Rows(0, self.key.factor)


@dataclass(frozen=True)
class Order(OrderState):
    """The place from which each sorted entry comes, divided by `per`. If `inverse`, the place to which each entry has gone."""

    key: SortKey
    inverse: bool = False
    per: int = 1

    @property
    def layout(self) -> Rows:
        return Rows(0, self.key.factor)


@dataclass(frozen=True)
class Counts(OrderState):
    """How many entries have each number. With `ends`, the place where the entries with each number end."""

    key: SortKey
    ends: bool = False


@dataclass(frozen=True)
class EntryIds(OrderState):
    """`arange(B * multiple)`: the numbers of all entries."""

    multiple: int

    @property
    def layout(self) -> Rows:
        return Rows(0, self.multiple)

    @property
    def why_internal(self) -> str:
        return COUNTS


@dataclass(frozen=True)
class Empty(OrderState):
    """Memory for an order, with nothing in it."""

    key: SortKey

    @property
    def layout(self) -> Rows:
        return Rows(0, self.key.factor)


# ---- states of several results ---------------------------------------------------------------------------------------


def flat(state: ResultState) -> tuple[ValueState, ...]:
    """The states of all results of a call."""
    return state if isinstance(state, tuple) else (state,)


def each(state: ValueState, value: object) -> ResultState:
    """The same state for every result of a call whose results are `value`."""
    return (state,) * len(value) if isinstance(value, (list, tuple)) else state


def change_rows(state: ResultState, change: Callable[[Rows], Rows]) -> ResultState:
    """The states of a call's results, where `change` is applied to each state that is `Rows`."""
    if isinstance(state, tuple):
        return tuple(change(s) if isinstance(s, Rows) else s for s in state)
    return change(state) if isinstance(state, Rows) else state
