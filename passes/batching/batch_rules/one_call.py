"""The state of one call's result: the table in the docstring of this package, line by line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from l2l_compile.passes.batching.batch_rules.call import (
    COMPUTES_WITH_ROW_IDS,
    USES_BATCH_AS_NUMBER,
    BatchSizes,
    Call,
    Refused,
    TracedValue,
    equal,
)
from l2l_compile.passes.batching.batch_rules.orders import of_orders
from l2l_compile.passes.batching.batch_rules.ranges import with_range
from l2l_compile.passes.batching.batch_rules.rules import Apply, BatchRule
from l2l_compile.passes.batching.batch_rules.states import Kind, Mixing, ResultState, RowIds, Rows, ValueState, change_rows, flat
from l2l_compile.passes.batching.batch_rules.sums import of_sums

SHARED_DRAWS = "draws random numbers that every row shares"
NO_RULE = "has no rule"


def state_of(call: Call, known: BatchRule, follow_orders: bool) -> ResultState:
    """The state of a call without a Mixing argument. Raises `Refused` where it mixes rows.

    Without `follow_orders`, a call that sorts entries counts as a call that mixes rows.
    """
    if not call.reads_batch:
        result = _of_invariants(call)
    elif call.reads(Kind.ORDERS):
        result = _with_equal_rows(of_orders(call, known), False)
    elif call.reads(Kind.SUMS):
        result = _with_equal_rows(of_sums(call, known), False)
    else:
        result = _of_rows(call, known)
    if not follow_orders:
        _refuse_orders(result)
    result = _fitted(call, result)
    if call.is_random and result is None:
        raise Refused(SHARED_DRAWS)
    return result


def _of_invariants(call: Call) -> ResultState:
    if not isinstance(call.op, torch._ops.OpOverload):
        raise Refused(NO_RULE)
    if call.is_random:
        raise Refused(SHARED_DRAWS)
    return call.each(None)


def _refuse_orders(result: ResultState) -> None:
    for state in flat(result):
        if state is not None and state.kind is Kind.ORDERS:
            raise Refused(state.why_internal)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _of_rows(call: Call, known: BatchRule) -> ResultState:
    """The result by the rule, with the known facts: equal rows, equal entries and the range of entries."""
    if known.rows is None:
        raise Refused(NO_RULE)
    if not call.varying <= set(known.sizes):
        raise Refused(USES_BATCH_AS_NUMBER)
    result = _by_rule(call, known, known.rows)
    if call.is_random or not known.keeps_equal_entries:
        result = change_rows(result, Rows.unequal)
    result = with_range(call, known, result, moves=known.keeps_row_ids)
    return _with_equal_rows(result, not call.is_random and _reads_equal_rows(call))


def _by_rule(call: Call, known: BatchRule, apply: Apply) -> ResultState:
    """The result by the rule. A rule that only moves entries takes row numbers as rows, and its results are row numbers."""
    if not call.reads_row_ids or known.reads_row_ids:
        return apply(call)
    if not known.keeps_row_ids:
        raise Refused(COMPUTES_WITH_ROW_IDS)
    result = apply(replace(call, arguments={name: _ids_as_rows(argument) for name, argument in call.arguments.items()}))
    if isinstance(result, tuple):
        return tuple(_rows_as_ids(*pair) for pair in zip(result, call.small_out, strict=True))
    return _rows_as_ids(result, call.small_out)


def _ids_as_rows(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_ids_as_rows(item) for item in argument]
    if isinstance(argument, TracedValue) and isinstance(argument.state, RowIds):
        return replace(argument, state=argument.state.layout)
    return argument


def _rows_as_ids(state: ValueState, value: torch.Tensor) -> RowIds:
    if not isinstance(state, Rows) or state.factor != 1 or value.dtype not in (torch.int64, torch.int32):
        raise Refused(COMPUTES_WITH_ROW_IDS)
    return RowIds(state.dim)


def _reads_equal_rows(call: Call) -> bool:
    """Whether rows made by this call are equal: a rule makes every row in the same way, so they are if it reads equal rows."""
    read = [state for state in call.states if state is not None and not isinstance(state, RowIds)]
    if not read and call.reads_row_ids:
        return False  # each row is picked by its own number
    return all(state.equal_rows for state in read)


def _with_equal_rows(result: ResultState, equal_rows: bool) -> ResultState:
    return change_rows(result, lambda rows: replace(rows, equal_rows=equal_rows or rows.equal_entries))


# ---- the sizes in both traces ----------------------------------------------------------------------------------------


def _fitted(call: Call, result: ResultState) -> ResultState:
    """The result, where Mixing replaces each state that does not agree with the sizes in both traces."""
    op, small, large = str(call.op), call.small_out, call.large_out
    if not isinstance(small, (list, tuple)):
        (state,) = flat(result)
        return fit(op, state, small, large, call.batch)
    if len(small) != len(large):
        raise Refused("gives as many results as the batch has rows")
    states = result if isinstance(result, tuple) else (result,) * len(small)
    return tuple(fit(op, *one, call.batch) for one in zip(states, small, large, strict=True))


def fit(op: str, state: ValueState, small: Any, large: Any, batch: BatchSizes) -> ValueState:
    """The state of a value if it agrees with the sizes in both traces; otherwise Mixing."""
    if isinstance(state, Mixing):
        return state
    if not isinstance(small, torch.Tensor):
        return state if equal(small, large) else Mixing(op, USES_BATCH_AS_NUMBER)
    reason = _why_not_comparable(small, large)
    if reason is not None:
        return Mixing(op, reason)
    try:
        seen = batch.rows_in(list(zip(small.shape, large.shape, strict=True)))
    except Refused as why:
        return Mixing(op, str(why))
    expected = None if state is None else state.layout
    return state if _entries(seen) == _entries(expected) else Mixing(op, "does not keep the rows of the batch in one dimension")


def _why_not_comparable(small: torch.Tensor, large: torch.Tensor) -> str | None:
    if not all(isinstance(size, int) for size in (*small.shape, *large.shape)):
        return "has a size that depends on the data"
    if small.ndim != large.ndim or small.dtype != large.dtype:
        return "gives another kind of value at another size of the batch"
    return None


def _entries(rows: Rows | None) -> tuple | None:
    """The dimension of the rows, and its entries for each row. Sizes show nothing else."""
    return None if rows is None else (rows.dim, rows.factor)
