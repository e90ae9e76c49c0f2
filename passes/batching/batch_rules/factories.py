"""Values made from nothing but a shape."""

from __future__ import annotations

import torch

from .orders import COUNTS, EntryIds
from .rules import rule
from .values import USES_BATCH_AS_NUMBER, Batch, Call, Refused, RowIds, State, Varying


@rule(
    "zeros.default",
    "ones.default",
    "full.default",
    "empty.memory_format",
    "new_zeros.default",
    "new_ones.default",
    "new_full.default",
    "new_empty.default",
    "empty_strided.default",
    "new_empty_strided.default",
    sizes=("size", "stride"),
    keeps_equal_entries=True,
)
def filled(call: Call) -> State:
    """All entries are equal: rows are where the size says."""
    return call.batch_in_result(equal_entries=True)


@rule("rand.default", "randn.default", "randint.default", "randint.low", sizes=("size",))
def drawn(call: Call) -> State:
    """Every entry on its own: rows are where the size says."""
    return call.batch_in_result()


@rule("arange.default", "arange.start", "arange.start_step", sizes=("end",))
def arange(call: Call) -> RowIds | EntryIds:
    """`arange(B)` numbers the rows, `arange(B * m)` the entries of a dimension with `m` a row."""
    end, start, step = call["end"], call["start"], call["step"]
    multiple, rest = divmod(end.small, call.small_batch) if isinstance(end, Varying) else (0, 0)
    whole = start in (None, 0) and step in (None, 1) and not rest and multiple > 0 and end.large == multiple * call.large_batch
    if not whole:
        raise Refused(COUNTS)
    if call.small_out.dtype not in (torch.int64, torch.int32):
        raise Refused("computes with the number of a row")
    return RowIds(0) if multiple == 1 else EntryIds(multiple)


@rule("scalar_tensor.default", "eye.default", "eye.m", "linspace.default")
def number(call: Call) -> Batch:
    raise Refused(USES_BATCH_AS_NUMBER)
