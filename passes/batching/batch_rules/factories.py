"""Operations that make a value from a shape alone."""

from __future__ import annotations

import torch

from l2l_compile.passes.batching.batch_rules.call import COMPUTES_WITH_ROW_IDS, USES_BATCH_AS_NUMBER, Call, Refused
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import COUNTS, EntryIds, ResultState, RowIds


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
def filled(call: Call) -> ResultState:
    """All entries are equal. The size shows where the rows are."""
    return call.batch_in_result(equal_entries=True)


@rule("rand.default", "randn.default", "randint.default", "randint.low", sizes=("size",))
def drawn(call: Call) -> ResultState:
    """Every entry is drawn independently. The size shows where the rows are."""
    return call.batch_in_result()


@rule("arange.default", "arange.start", "arange.start_step", sizes=("end",))
def arange(call: Call) -> RowIds | EntryIds:
    """`arange(B)` numbers the rows, `arange(B * m)` numbers the entries of a dimension with `m` entries per row."""
    multiple = call.batch.multiple_of(call["end"])
    if multiple is None or call["start"] not in (None, 0) or call["step"] not in (None, 1):
        raise Refused(COUNTS)
    if call.small_out.dtype not in (torch.int64, torch.int32):
        raise Refused(COMPUTES_WITH_ROW_IDS)
    return RowIds(0) if multiple == 1 else EntryIds(multiple)


@rule("scalar_tensor.default", "eye.default", "eye.m", "linspace.default")
def number(call: Call) -> ResultState:
    raise Refused(USES_BATCH_AS_NUMBER)
