"""Entries that are sorted and put back: how a mixture of experts groups what each expert gets.

    ids [S], whole numbers below E, such as topk gives                    Batch(0, m, below=E)
    ids, perm = sort(ids)                                                 Sorted(key), Order(key)
    x[perm // k], weight[perm], table[ids]                                Batch(0, m, order=key)
    ends = cumsum(histc(ids, E, 0, E - 1))                                Counts(key), Counts(key, ends=True)
    x = grouped_mm(x, matrices, ends)                                     Batch(0, m, order=key)
    inverse[perm] = arange(S)                                             EntryIds(m), Order(key, inverse=True)
    x[inverse]                                                            Batch(0, m)

Every micro-batch sorts its own entries. Which matrix an entry is multiplied with depends on its own number alone, as long as
the ends are those of the numbers that it was sorted by. Order and counts differ from micro-batch to micro-batch, and
from those of the whole batch: nothing else may read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .indexing import advanced_index
from .reductions import along
from .rules import Rule, rule
from .values import Batch, Call, Refused, RowIds, State, TracedValue, dims

COUNTS = "counts something other than the rows of the batch"
MOVED = "reads entries in an order that depends on the other rows"


class Key:
    """What entries have been sorted by, in one call of `sort`: `upper_bound` is that of the numbers, `factor` entries a row."""

    def __init__(self, upper_bound: int, factor: int):
        self.upper_bound, self.factor = upper_bound, factor


@dataclass(frozen=True)
class Sorted:
    """The numbers themselves, in their order."""

    key: Key


@dataclass(frozen=True)
class Order:
    """Where each sorted entry comes from, divided by `per`; or, inverse, where each entry has gone to."""

    key: Key
    inverse: bool = False
    per: int = 1


@dataclass(frozen=True)
class Counts:
    """How many entries have each number, or where those of each number end."""

    key: Key
    ends: bool = False


@dataclass(frozen=True)
class EntryIds:
    """`arange(B * multiple)`."""

    multiple: int


@dataclass(frozen=True)
class Empty:
    """Memory for an order, with nothing in it."""

    key: Key


def concerns(state: State) -> bool:
    """Whether a value has to do with entries in another order."""
    return isinstance(state, Sorted | Order | Counts | EntryIds | Empty) or (isinstance(state, Batch) and state.order is not None)


def why_not_rows(state: State) -> str:
    """Why nothing else may read such a value."""
    return COUNTS if isinstance(state, EntryIds) else MOVED


def layout(state: State) -> State:
    """Where the entries of such a value stand, whatever they are; other states as they are."""
    if isinstance(state, Sorted | Order | Empty):
        return Batch(0, state.key.factor)
    return Batch(0, state.multiple) if isinstance(state, EntryIds) else None if isinstance(state, Counts) else state


def of_orders(call: Call, known: Rule | None) -> State | tuple[State, ...]:
    """The state of a call that reads such a value."""
    apply = _ORDERS.get(call.op.name())
    if apply is not None:
        return apply(call)
    for value in call.values():
        if isinstance(value.state, EntryIds):
            raise Refused(why_not_rows(value.state))
    call = replace(call, arguments={name: _as_rows(argument) for name, argument in call.arguments.items()})
    rows = {value.state.order for value in call.values() if isinstance(value.state, Batch)}
    others = [value for value in call.values() if value.state is not None and not isinstance(value.state, Batch)]
    if known is None or not known.keeps_order or len(rows) != 1 or others:
        raise Refused(MOVED)
    return with_range(call, known.apply(call), False)


def _as_rows(argument: Any) -> Any:
    """Sorted numbers as any value in that order."""
    if isinstance(argument, list):
        return [_as_rows(item) for item in argument]
    if isinstance(argument, TracedValue) and isinstance(argument.state, Sorted):
        return replace(argument, state=Batch(0, argument.state.key.factor, order=argument.state.key))
    return argument


def with_range(call: Call, result: State | tuple[State, ...], moves: bool) -> State | tuple[State, ...]:
    """The result, with what is known of the entries' range: of positions, and of entries that are only moved."""
    value, results = call["self"], result if isinstance(result, tuple) else (result,)
    if call.op.name() in _POSITIONS and value.ndim and call["dim"] is not None:
        results = (*(_below(r, None) for r in results[:-1]), _below(results[-1], value.shape[dims(call["dim"], value.ndim)[0]]))
    elif not moves or not _holds_whole_numbers(call.small_out):
        results = tuple(_below(r, None) for r in results)
    return results if isinstance(result, tuple) else results[0]


def _below(state: State, size: int | None) -> State:
    return replace(state, upper_bound=size) if isinstance(state, Batch) else state


def _holds_whole_numbers(value: Any) -> bool:
    """Whether a dtype holds the numbers of a few thousand experts."""
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return all(t.dtype in (torch.int64, torch.int32, torch.float32, torch.float64) for t in tensors)


_POSITIONS = (
    "aten::topk",
    "aten::argmax",
    "aten::argmin",
    "aten::sort",
    "aten::sort.stable",
)  # along a dimension, in the last result


# ---- rules -----------------------------------------------------------------------------------------------------------

_ORDERS: dict[str, Callable[[Call], State]] = {}


def _order(*names: str) -> Callable:
    def register(apply: Callable) -> Callable:
        _ORDERS.update(dict.fromkeys(names, apply))
        return apply

    return register


@rule("sort.default", "sort.stable", keeps_order=True)
def sort(call: Call) -> State | tuple[State, ...]:
    """Along another dimension, or of entries whose range is known."""
    value, place = call.batched()
    if value.ndim != 1 or place.upper_bound is None or place.outer != 1 or call["descending"]:
        return along(call)
    key = Key(place.upper_bound, place.factor)
    return Sorted(key), Order(key)


@_order("aten::floor_divide", "aten::div.Tensor_mode")
def divided(call: Call) -> State:
    """From the entry to the row of another value, with fewer entries a row."""
    state, by = call["self"].state, call["other"]
    floor = call.op.name() == "aten::floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    if (
        not isinstance(state, Order)
        or state.inverse
        or not isinstance(by, int)
        or not floor
        or by < 1
        or state.key.factor % (state.per * by)
    ):
        raise Refused(MOVED)
    return replace(state, per=state.per * by)


@_order("aten::index.Tensor")
def index(call: Call) -> State:
    """Puts rows into the order, sorted entries back, or looks sorted entries up in a table that every row shares."""
    value, indices = call["self"], _as_rows(call["indices"])
    if value.state is None and all(i is None or isinstance(i.state, Batch | None) for i in indices):
        return _below(advanced_index(value, indices), None)
    by = indices[0].state if len(indices) == 1 else None
    if not isinstance(by, Order) or not isinstance(value.state, Batch) or (value.state.dim, value.state.outer) != (0, 1):
        raise Refused(MOVED)
    if by.inverse and value.state.order is by.key and value.state.multiple == by.key.factor:
        return Batch(0, by.key.factor)
    if not by.inverse and value.state.order is None and value.state.multiple * by.per == by.key.factor:
        return Batch(0, by.key.factor, order=by.key)
    raise Refused(MOVED)


@_order("aten::histc")
def count(call: Call) -> State:
    """A bin for each number."""
    state, bins = call["self"].state, call["bins"]
    if not isinstance(state, Sorted) or not 1 < bins >= state.key.upper_bound or (call["min"], call["max"]) != (0, bins - 1):
        raise Refused(MOVED)
    return Counts(state.key)


@_order("aten::cumsum")
def ends(call: Call) -> State:
    state = call["self"].state
    if isinstance(state, Batch):
        return _below(along(call), None)
    if not isinstance(state, Counts) or state.ends:
        raise Refused(MOVED)
    return replace(state, ends=True)


@_order("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def grouped(call: Call) -> State:
    """[S, in] in groups with [groups, in, out]: entries with the first matrix, with the second, ..., up to their ends."""
    names = ("self", "mat2") if call.op.namespace == "aten" else ("input", "weight")
    value, matrices, ends = (call[name] for name in (*names, "offs"))
    known = all(isinstance(v, TracedValue) for v in (value, matrices, ends)) and matrices.state is None and matrices.ndim == 3
    if not known or not isinstance(value.state, Batch) or value.state.dim != 0 or call.rows("bias") is not None:
        raise Refused(MOVED)
    if not isinstance(ends.state, Counts) or not ends.state.ends or ends.state.key is not value.state.order:
        raise Refused("groups entries that are not sorted by what was counted")
    return value.state


@_order("aten::empty_like", "aten::new_empty", "aten::zeros_like")
def empty(call: Call) -> State:
    state = call["self"].state
    if not isinstance(state, Order) or tuple(call.small_out.shape) != tuple(call["self"].small.shape):
        raise Refused(MOVED)
    return Empty(state.key)


@_order("aten::index_put", "aten::index_put_")
def inverted(call: Call) -> State:
    """`inverse[perm] = arange(S)`."""
    indices, numbers = call["indices"], call["values"].state
    by = indices[0].state if len(indices) == 1 else None
    multiple = numbers.multiple if isinstance(numbers, EntryIds) else 1 if isinstance(numbers, RowIds) else None
    whole = isinstance(by, Order) and not by.inverse and by.per == 1 and isinstance(call["self"].state, Empty)
    if not whole or call["accumulate"] or multiple != by.key.factor:
        raise Refused(MOVED)
    return Order(by.key, inverse=True)


@_order("aten::sort", "aten::sort.stable")
def sorted_again(call: Call) -> State:
    """Of an order: its inverse."""
    state = call["self"].state
    if isinstance(state, Batch):
        return with_range(call, along(call), False)
    if not isinstance(state, Order) or state.inverse or state.per != 1 or call["descending"]:
        raise Refused(MOVED)
    return EntryIds(state.key.factor), Order(state.key, inverse=True)


@_order("aten::_to_copy", "aten::clone", "aten::alias", "aten::detach")
def copied(call: Call) -> State:
    state = call["self"].state
    exact = (
        _holds_whole_numbers(call.small_out) if isinstance(state, Sorted | Counts) else not call.small_out.dtype.is_floating_point
    )
    if not isinstance(state, Batch) and not exact:
        raise Refused(MOVED)
    return _below(state, None)


@_order("aten::view", "aten::_unsafe_view")
def viewed(call: Call) -> State:
    """Other dimensions than the sorted one in another shape."""
    value, result = call["self"], call.batch_in_result()
    if value.small.shape == call.small_out.shape:
        return value.state
    if (
        not isinstance(value.state, Batch)
        or result is None
        or value.state.dim
        or result.dim
        or value.state.factor != result.factor
    ):
        raise Refused(MOVED)
    return value.state
