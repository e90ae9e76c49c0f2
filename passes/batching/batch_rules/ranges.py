"""The range of entries: whole numbers that are known to be below a bound (`Rows.upper_bound`)."""

from __future__ import annotations

from typing import Any

import torch

from l2l_compile.passes.batching.batch_rules.call import Call, dims
from l2l_compile.passes.batching.batch_rules.rules import BatchRule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows, change_rows, flat


def with_range(call: Call, known: BatchRule, result: ResultState, moves: bool) -> ResultState:
    """The result with its range, which is known for positions, and for entries that the call only `moves`."""
    if known.gives_positions and call["self"].ndim and call["dim"] is not None:
        return positions(call, result)
    return result if moves and holds_whole_numbers(call.small_out) else unbounded(result)


def positions(call: Call, result: ResultState) -> ResultState:
    """The result of a call whose last result holds positions along `dim`: these are below the size of that dimension."""
    value = call["self"]
    size = value.shape[dims(call["dim"], value.ndim)[0]]
    *others, last = flat(unbounded(result))
    bounded = last.bounded(size) if isinstance(last, Rows) else last
    return (*others, bounded) if isinstance(result, tuple) else bounded


def unbounded(result: ResultState) -> ResultState:
    """The result, with an unknown range."""
    return change_rows(result, lambda rows: rows.bounded(None))


def holds_whole_numbers(value: Any) -> bool:
    """Whether the dtype can hold the numbers of a few thousand experts exactly."""
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return all(t.dtype in (torch.int64, torch.int32, torch.float32, torch.float64) for t in tensors)
