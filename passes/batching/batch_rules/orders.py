"""Entries that are sorted and put back: how a mixture of experts groups the tokens of each expert.

    ids [S], whole numbers below E, such as topk gives                    Rows(0, m, upper_bound=E)
    ids, perm = sort(ids)                                                 Sorted(key), Order(key)
    x[perm // k], weight[perm], table[ids]                                Rows(0, m, order=key)
    ends = cumsum(histc(ids, E, 0, E - 1))                                Counts(key), Counts(key, ends=True)
    x = grouped_mm(x, matrices, ends)                                     Rows(0, m, order=key)
    inverse[perm] = arange(S)                                             EntryIds(m), Order(key, inverse=True)
    x[inverse]                                                            Rows(0, m)

Every micro-batch sorts its own entries. The matrix that an entry is multiplied with depends on the entry's number alone, if
the ends were counted from the numbers by which the entries are sorted. Order and counts differ between micro-batches, and
differ from the order and counts of the whole batch. No other operation may read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, TracedValue
from l2l_compile.passes.batching.batch_rules.indexing import advanced_index
from l2l_compile.passes.batching.batch_rules.ranges import holds_whole_numbers, positions, unbounded, with_range
from l2l_compile.passes.batching.batch_rules.reductions import along
from l2l_compile.passes.batching.batch_rules.rules import BatchRule, rule
from l2l_compile.passes.batching.batch_rules.states import (
    MOVED,
    Counts,
    Empty,
    EntryIds,
    Kind,
    Order,
    ResultState,
    RowIds,
    Rows,
    Sorted,
    SortKey,
    State,
    ValueState,
)

S = TypeVar("S", bound=State)


def of_orders(call: Call, known: BatchRule) -> ResultState:
    """The state of a call that reads sorted entries, their order or their counts."""
    return known.orders(call) if known.orders is not None else _entry_by_entry(call, known)


def _entry_by_entry(call: Call, known: BatchRule) -> ResultState:
    """The state if the operation treats an entry alike in every place, and its arguments are sorted in one order."""
    for state in call.states:
        if isinstance(state, EntryIds):
            raise Refused(state.why_internal)
    call = replace(call, arguments={name: _numbers_as_rows(argument) for name, argument in call.arguments.items()})
    if known.rows is None or not known.keeps_order or not _are_sorted_alike(call.states):
        raise Refused(MOVED)
    return with_range(call, known, known.rows(call), moves=False)


def _are_sorted_alike(states: list[ValueState]) -> bool:
    """Whether all values that depend on the batch hold rows, in one order."""
    batched = [state for state in states if state is not None]
    rows = [state for state in batched if isinstance(state, Rows)]
    return len(rows) == len(batched) and len({state.order for state in rows}) == 1


def _numbers_as_rows(argument: Any) -> Any:
    """The argument, with sorted numbers described as rows in that order."""
    if isinstance(argument, list):
        return [_numbers_as_rows(item) for item in argument]
    if isinstance(argument, TracedValue) and isinstance(argument.state, Sorted):
        key = argument.state.key
        return replace(argument, state=Rows(0, key.factor, order=key))
    return argument


def _expect(kind: type[S], value: Any) -> S:
    """The state of an argument; refuses the call if it is of another kind."""
    if not isinstance(value, TracedValue) or not isinstance(value.state, kind):
        raise Refused(MOVED)
    return value.state


# ---- rules -----------------------------------------------------------------------------------------------------------


@rule("sort.default", "sort.stable", keeps_order=True, gives_positions=True)
def sort(call: Call) -> ResultState:
    """Sorts along a dimension other than the batch dimension, or sorts entries whose range is known."""
    value, rows = call.batched()
    if value.ndim != 1 or rows.upper_bound is None or rows.outer != 1 or call["descending"]:
        return along(call)
    key = SortKey(rows.upper_bound, rows.factor)
    return Sorted(key), Order(key)


@rule("floor_divide.default", "div.Tensor_mode", of=Kind.ORDERS)
def divided(call: Call) -> ResultState:
    """`perm // k`: from the place of an entry to a place in a value with fewer entries per row."""
    order, by = _expect(Order, call["self"]), call["other"]
    rounds_down = call.op.name() == "aten::floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    if order.inverse or not rounds_down or not isinstance(by, int) or by < 1:
        raise Refused(MOVED)
    per = order.per * by
    if order.key.factor % per:
        raise Refused(MOVED)
    return replace(order, per=per)


@rule("index.Tensor", of=Kind.ORDERS)
def index(call: Call) -> ResultState:
    """Sorts rows by an order, puts sorted entries back, or looks sorted entries up in a table that every row shares."""
    value, indices = call["self"], _numbers_as_rows(call["indices"])
    in_table = value.state is None and all(i is None or isinstance(i.state, Rows | None) for i in indices)
    if in_table:
        return unbounded(advanced_index(value, indices))
    if len(indices) != 1:
        raise Refused(MOVED)
    order, rows = _expect(Order, indices[0]), _expect(Rows, value)
    if (rows.dim, rows.outer) != (0, 1):
        raise Refused(MOVED)
    return _put_back(rows, order) if order.inverse else _put_in_order(rows, order)


def _put_back(rows: Rows, order: Order) -> Rows:
    if rows.order is not order.key or rows.multiple != order.key.factor:
        raise Refused(MOVED)
    return Rows(0, order.key.factor)


def _put_in_order(rows: Rows, order: Order) -> Rows:
    if rows.order is not None or rows.multiple * order.per != order.key.factor:
        raise Refused(MOVED)
    return Rows(0, order.key.factor, order=order.key)


@rule("histc.default", of=Kind.ORDERS)
def count(call: Call) -> ResultState:
    """Counts the entries with each number: every number has a bin of its own."""
    numbers, bins = _expect(Sorted, call["self"]), call["bins"]
    if not 1 < bins >= numbers.key.upper_bound or (call["min"], call["max"]) != (0, bins - 1):
        raise Refused(MOVED)
    return Counts(numbers.key)


@rule("cumsum.default", of=Kind.ORDERS)
def ends(call: Call) -> ResultState:
    if isinstance(call["self"].state, Rows):
        return unbounded(along(call))
    counts = _expect(Counts, call["self"])
    if counts.ends:
        raise Refused(MOVED)
    return replace(counts, ends=True)


@rule("_grouped_mm.default", "transformers::grouped_mm_fallback.default", of=Kind.ORDERS)
def grouped(call: Call) -> ResultState:
    """Multiplies [S, in] by [groups, in, out]: entries up to the first end by the first matrix, and so on for each end."""
    names = ("self", "mat2") if call.op.namespace == "aten" else ("input", "weight")
    value, matrices, ends = (call[name] for name in (*names, "offs"))
    rows = _expect(Rows, value)
    shares_matrices = isinstance(matrices, TracedValue) and matrices.state is None and matrices.ndim == 3
    if not shares_matrices or rows.dim != 0 or call.rows("bias") is not None or not isinstance(ends, TracedValue):
        raise Refused(MOVED)
    if not _ends_groups_of(ends.state, rows.order):
        raise Refused("groups entries that are not sorted by what was counted")
    return rows


def _ends_groups_of(state: ValueState, order: object) -> bool:
    return isinstance(state, Counts) and state.ends and state.key is order


@rule("empty_like.default", "new_empty.default", "zeros_like.default", of=Kind.ORDERS)
def empty(call: Call) -> ResultState:
    order = _expect(Order, call["self"])
    if tuple(call.small_out.shape) != tuple(call["self"].small.shape):
        raise Refused(MOVED)
    return Empty(order.key)


@rule("index_put.default", "index_put_.default", of=Kind.ORDERS)
def inverted(call: Call) -> ResultState:
    """`inverse[perm] = arange(S)`."""
    indices, numbers = call["indices"], call["values"].state
    if len(indices) != 1 or call["accumulate"]:
        raise Refused(MOVED)
    order = _expect(Order, indices[0])
    _expect(Empty, call["self"])
    if order.inverse or order.per != 1 or _multiple(numbers) != order.key.factor:
        raise Refused(MOVED)
    return Order(order.key, inverse=True)


def _multiple(numbers: ValueState) -> int | None:
    """Entries per row of a value that numbers its entries; None for any other value."""
    if isinstance(numbers, RowIds):
        return 1
    return numbers.multiple if isinstance(numbers, EntryIds) else None


@rule("sort.default", "sort.stable", of=Kind.ORDERS)
def sorted_again(call: Call) -> ResultState:
    """Sorting an order gives its inverse."""
    if isinstance(call["self"].state, Rows):
        return positions(call, along(call))
    order = _expect(Order, call["self"])
    if order.inverse or order.per != 1 or call["descending"]:
        raise Refused(MOVED)
    return EntryIds(order.key.factor), Order(order.key, inverse=True)


@rule("_to_copy.default", "clone.default", "alias.default", "detach.default", of=Kind.ORDERS)
def copied(call: Call) -> ResultState:
    """The same state, unless the new dtype cannot hold the numbers."""
    state: ValueState = call["self"].state
    if isinstance(state, Sorted | Counts) and not holds_whole_numbers(call.small_out):
        raise Refused(MOVED)
    if isinstance(state, Order | EntryIds | Empty) and call.small_out.dtype.is_floating_point:
        raise Refused(MOVED)
    return unbounded(state)


@rule("view.default", "_unsafe_view.default", of=Kind.ORDERS)
def viewed(call: Call) -> ResultState:
    """Changes the shape of dimensions other than the sorted dimension."""
    value, result = call["self"], call.batch_in_result()
    if value.small.shape == call.small_out.shape:
        return value.state
    rows = _expect(Rows, value)
    if result is None or rows.dim or result.dim or rows.factor != result.factor:
        raise Refused(MOVED)
    return rows
