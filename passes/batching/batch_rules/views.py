"""Other views of the same entries: reshapes, permutations and cuts."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from l2l_compile.passes.batching.batch_rules.call import (
    DIFFERENT_DIMENSIONS,
    USES_BATCH_AS_NUMBER,
    Call,
    Refused,
    Varying,
    aligned,
    dims,
)
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows, ValueState

CUTS = "takes some rows of the batch"


@rule("_conj.default", "_neg_view.default", "view_as_real.default", "view_as_complex.default", keeps_order=True)
@rule("alias.default", "detach.default", keeps_row_ids=True, keeps_order=True)
def same_dims(call: Call) -> Rows:
    """Leading dimensions keep their places."""
    return call.batched()[1]


@rule("view.default", "_unsafe_view.default", "_reshape_alias.default", sizes=("size", "stride"), keeps_row_ids=True)
def reshape(call: Call) -> Rows:
    """As many entries as before stand before the rows: in the dimensions before the batch dimension, or outermost in it."""
    value, rows = call.batched()
    result = call.batch_in_result()
    if result is None:
        raise Refused("does not keep the rows of the batch in one dimension")
    before = math.prod(size for size, _ in value.sizes[: rows.dim]) * rows.outer
    ahead = math.prod(size for size, _ in call.out_sizes[: result.dim])
    outer, rest = divmod(before, ahead) if ahead else (0, 0)
    if rest or outer < 1 or result.factor % outer:
        raise Refused("folds the batch behind another dimension")
    return Rows(result.dim, result.factor // outer, outer, upper_bound=rows.upper_bound)


@rule("view.dtype")
def reinterpret(call: Call) -> Rows:
    """Reads the bytes of the last dimension as another dtype."""
    value, rows = call.batched()
    if rows.dim == value.ndim - 1:
        raise Refused("reads several rows as one entry")
    return rows


@rule("expand.default", sizes=("size",), keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def expand(call: Call) -> ResultState:
    """Repeats entries. A value that every row shares gets rows in the dimension that is expanded to the batch."""
    rows = aligned(call["self"], len(call.out_sizes))
    return call.batch_in_result(equal_entries=True) if rows is None else rows


@rule("unsqueeze.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def unsqueeze(call: Call) -> Rows:
    value, rows = call.batched()
    added = call["dim"] % (value.ndim + 1)
    return rows.at(rows.dim + (added <= rows.dim))


@rule("squeeze.dim", "squeeze.dims", keeps_row_ids=True, keeps_order=True)
def squeeze(call: Call) -> Rows:
    value, rows = call.batched()
    asked = dims(call["dim"], value.ndim) if call["dim"] != [] else []
    if rows.dim in asked:
        raise Refused("drops the batch dimension of a micro-batch of one row")
    return rows.at(rows.dim - sum(value.shape[dim] == 1 for dim in asked if dim < rows.dim))


@rule("squeeze.default")
def squeeze_all(call: Call) -> ResultState:
    raise Refused("drops the batch dimension of a micro-batch of one row")


@rule("permute.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def permute(call: Call) -> Rows:
    value, rows = call.batched()
    order = [dim % value.ndim for dim in call["dims"]]
    return rows.at(order.index(rows.dim))


@rule("transpose.int", "t.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def transpose(call: Call) -> Rows:
    value, rows = call.batched()
    if call["dim0"] is None:  # t
        one, other = 0, value.ndim - 1
    else:
        one, other = call["dim0"] % value.ndim, call["dim1"] % value.ndim
    return rows.at({one: other, other: one}.get(rows.dim, rows.dim))


@rule("select.int", "unbind.int", keeps_row_ids=True, keeps_order=True)
def take_out(call: Call) -> ResultState:
    """Drops one dimension: takes one position of it, or each position as a result of its own."""
    value, rows = call.batched()
    dim = call["dim"] % value.ndim
    if dim == rows.dim:
        raise Refused(CUTS)
    return call.each(rows.at(rows.dim - (dim < rows.dim)))


@rule("slice.Tensor", sizes=("end",), keeps_row_ids=True, keeps_order=True)
def slice_along(call: Call) -> Rows:
    """A slice of another dimension, or all of the batch: `x[:]` and `x[:B]`, not `x[:100]`, which holds up to 100 rows."""
    value, rows = call.batched()
    start, end, step = call["start"], call["end"], call["step"]
    if call["dim"] % value.ndim != rows.dim:
        if isinstance(end, Varying):
            raise Refused(USES_BATCH_AS_NUMBER)
        return rows
    is_size = isinstance(end, Varying) and (end.small, end.large) == value.sizes[rows.dim]
    to_the_end = end is None or end == sys.maxsize or is_size
    if start not in (None, 0) or step != 1 or not to_the_end:
        raise Refused(CUTS)
    return rows


@rule(
    "split.Tensor",
    "split_with_sizes.default",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes.default",
    keeps_row_ids=True,
    keeps_order=True,
)
def split(call: Call) -> tuple[ValueState, ...]:
    value, rows = call.batched()
    if call["dim"] % value.ndim == rows.dim:
        raise Refused(CUTS)
    return (rows,) * len(call.small_out)


@rule("unfold.default")
def unfold(call: Call) -> Rows:
    """Windows over a dimension other than the batch dimension; the window becomes the last dimension."""
    value, rows = call.batched()
    if call["dimension"] % value.ndim == rows.dim:
        raise Refused("slides a window over the batch")
    return rows


@rule("diagonal.default")
def diagonal(call: Call) -> Rows:
    value, rows = call.batched()
    taken = dims([call["dim1"], call["dim2"]], value.ndim)
    if rows.dim in taken:
        raise Refused("takes a diagonal across the batch")
    return rows.at(rows.dim - sum(dim < rows.dim for dim in taken))


@rule("as_strided.default", sizes=("size", "stride"))
def strided(call: Call) -> Rows:
    """Windows over contiguous memory [outer, rows, inner], of which none reaches from one row into the next.

    A stride is a number of steps along `outer` plus a remainder along `inner`.
    """
    value, rows = call.batched()
    result = call.batch_in_result()
    if result is None or rows.outer != 1 or call["storage_offset"] not in (None, 0):
        raise Refused(CUTS)
    inner = rows.multiple * math.prod(value.shape[rows.dim + 1 :])
    small = _windows(value.small, call.small_out, result, inner, call.batch.small)
    large = _windows(value.large, call.large_out, result, inner, call.batch.large)
    if small != large:
        raise Refused(USES_BATCH_AS_NUMBER)
    return result


@dataclass(frozen=True)
class _Window:
    """A dimension of a strided view: its size, and its stride as steps along the outer and the inner dimensions of memory."""

    size: int
    outer_steps: int
    inner_steps: int


def _windows(source: torch.Tensor, made: torch.Tensor, rows: Rows, inner: int, batch: int) -> list[_Window]:
    """The dimensions of a strided view, except the batch dimension. Refuses a view that reads other rows.

    A row has `inner` entries in memory.
    """
    steps = list(zip(made.shape, made.stride(), strict=True))
    _, apart = steps.pop(rows.dim)
    windows = [_Window(size, *divmod(stride, batch * inner)) for size, stride in steps if size != 1]
    reach = 1 + sum((window.size - 1) * window.inner_steps for window in windows)
    from_the_start = source.is_contiguous() and source.storage_offset() == 0
    if not from_the_start or apart * rows.multiple != inner or reach > apart:
        raise Refused("reads other rows, or memory that is not laid out row by row")
    return windows


@rule("as_strided_.default", sizes=("size", "stride"), leaves_sizes=True)
def restride(call: Call) -> Rows:
    """Changes only the strides of dimensions of size 1 (average pooling to one entry, channels last)."""
    value, rows = call.batched()
    for before, after in ((value.small, call.small_out), (value.large, call.large_out)):
        strides = zip(before.shape, before.stride(), after.stride(), strict=False)
        if before.shape != after.shape or any(size != 1 and old != new for size, old, new in strides):
            raise Refused("lays the rows out in memory anew")
    if call["storage_offset"] is not None:
        raise Refused("lays the rows out in memory anew")
    return rows


@rule("slice_scatter.default", "select_scatter.default")
def write_back(call: Call) -> Rows:
    """A copy with one slice of another dimension replaced."""
    value, rows = call.batched()
    dim = call["dim"] % value.ndim
    if dim == rows.dim:
        raise Refused("writes some rows of the batch")
    source = call.rows("src")
    dropped = dim < rows.dim and call["src"].ndim < value.ndim
    if source != rows.at(rows.dim - dropped):
        raise Refused(DIFFERENT_DIMENSIONS)
    return rows
