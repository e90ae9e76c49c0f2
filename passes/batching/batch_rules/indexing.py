"""Look-ups: in a table that every row shares, within each row, or with `arange(B)` for the batch dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from l2l_compile.passes.batching.batch_rules.call import (
    COMPUTES_WITH_ROW_IDS,
    DIFFERENT_DIMENSIONS,
    Call,
    Refused,
    TracedValue,
    agree,
    agree_if_any,
    aligned,
)
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import RowIds, Rows

PICKS = "picks rows by number"
PICKS_BY_DATA = "picks as many entries as the data says"


@rule("embedding.default")
def embedding(call: Call) -> Rows:
    """Table [entries, features] and indices [...]."""
    if call["scale_grad_by_freq"]:
        raise Refused("divides gradients by how often an entry is read in the whole batch (scale_grad_by_freq)")
    call.invariant("weight")
    return call.batched("indices")[1]


@rule("index_select.default")
def index_select(call: Call) -> Rows:
    value, index = call["self"], call.rows("index")
    dim = call["dim"] % max(value.ndim, 1)
    if value.rows is None:
        return call.batched("index")[1].at(dim)
    if index is not None or value.rows.dim == dim:
        raise Refused(PICKS)
    return value.rows


@rule("gather.default")
def gather(call: Call) -> Rows:
    """`out[i][j] = self[i][index[i][j]]` along `dim`: positions in the other dimensions are kept."""
    value, index = call["self"], call["index"]
    dim = call["dim"] % max(value.ndim, 1)
    if value.rows is None:
        _, rows = call.batched("index")
        if rows.dim != dim:
            raise Refused("reads an entry for each row from a value that every row shares")
        return rows
    if value.rows != index.rows or value.rows.dim == dim:
        raise Refused(PICKS)
    return value.rows


@rule("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add.default", "scatter_reduce.two")
def scatter(call: Call) -> Rows:
    """The counterpart of gather: every row writes into itself."""
    value, rows = call.batched()
    if rows.dim == call["dim"] % value.ndim:
        raise Refused("writes rows by number")
    sources = [call.rows(name) for name in ("index", "src") if isinstance(call[name], TracedValue)]
    if None in sources:
        raise Refused(DIFFERENT_DIMENSIONS)
    return agree([rows, *sources])


@rule("index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce.default")
def write_positions(call: Call) -> Rows:
    """Writes to positions of a dimension other than the batch dimension, the same positions in every row."""
    call.invariant("index", "value")
    value, rows = call.batched()
    if rows.dim == call["dim"] % value.ndim:
        raise Refused("writes rows by number")
    if call["source"] is not None and call.rows("source") != rows:
        raise Refused(DIFFERENT_DIMENSIONS)
    return rows


@rule("index.Tensor", "_unsafe_index.Tensor", reads_row_ids=True)
def index(call: Call) -> Rows:
    return advanced_index(call["self"], call["indices"])


@rule("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default", reads_row_ids=True)
def index_put(call: Call) -> Rows:
    """Writes `values`, after broadcasting, to the entries that `index` would read."""
    value, rows = call.batched()
    if isinstance(value.state, RowIds) or isinstance(call["values"].state, RowIds):
        raise Refused(COMPUTES_WITH_ROW_IDS)
    if _has_masks(call["indices"]):
        return _fill_masked(call, value, rows)
    read = advanced_index(value, call["indices"])
    ndim = value.ndim - sum(index is not None for index in call["indices"]) + _index_ndim(call["indices"])
    agree([read, aligned(call["values"], ndim)])
    return rows


def _has_masks(indices: list[TracedValue | None]) -> bool:
    return any(index is not None and index.small.dtype in (torch.bool, torch.uint8) for index in indices)


def _fill_masked(call: Call, value: TracedValue, rows: Rows) -> Rows:
    """`x[mask] = v`: row by row if every entry that the mask picks gets the same `v`."""
    masks = [(position, index) for position, index in enumerate(call["indices"]) if index is not None]
    (position, mask), values = masks[0], call["values"]
    if len(masks) > 1 or values.state is not None or values.ndim > value.ndim - mask.ndim:
        raise Refused(PICKS_BY_DATA)
    if mask.rows is not None and mask.rows.at(mask.rows.dim + position) != rows:
        raise Refused(DIFFERENT_DIMENSIONS)
    return rows


def advanced_index(value: TracedValue, indices: list[TracedValue | None]) -> Rows:
    """Where the rows of `value[indices]` stand, by numpy's rules. Each leading dimension has an index tensor or None.

    Index tensors are broadcast together. If the indexed dimensions are neighbours, the dimensions of the index tensors take
    their place; otherwise they come first.
    """
    by_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    if _has_masks(indices):
        raise Refused(PICKS_BY_DATA)
    _check_row_ids(value, by_dim)
    rows, indexed = value.rows, _rows_of_indices(by_dim)
    if rows is not None and rows.dim not in by_dim:
        if indexed is not None:
            raise Refused("looks every row's indices up in every row")
        return rows.at(_dim_after(rows.dim, by_dim))
    picks_rows = rows is not None and not isinstance(by_dim[rows.dim].state, RowIds)
    if picks_rows or indexed is None:
        raise Refused(PICKS)
    return indexed.at(_start_of_indexed(by_dim) + indexed.dim)


def _check_row_ids(value: TracedValue, by_dim: dict[int, TracedValue]) -> None:
    """Refuses the numbers of rows, except as indices of the batch dimension of a value with one entry per row."""
    if isinstance(value.state, RowIds):
        raise Refused(COMPUTES_WITH_ROW_IDS)
    for dim, index in by_dim.items():
        if isinstance(index.state, RowIds) and (value.rows is None or dim != value.rows.dim or value.rows.factor != 1):
            raise Refused(COMPUTES_WITH_ROW_IDS)


def _rows_of_indices(by_dim: dict[int, TracedValue]) -> Rows | None:
    """Where the rows of the index tensors stand once these are broadcast together; None if all are invariant."""
    ndim = _index_ndim(list(by_dim.values()))
    batched = [(index, index.state.layout) for index in by_dim.values() if index.state is not None]
    return agree_if_any([rows and rows.at(rows.dim + ndim - index.ndim) for index, rows in batched])


def _dim_after(dim: int, by_dim: dict[int, TracedValue]) -> int:
    """The dimension of the result that corresponds to a dimension without an index."""
    kept_before = dim - sum(indexed < dim for indexed in by_dim)
    is_behind = kept_before >= _start_of_indexed(by_dim)
    return kept_before + _index_ndim(list(by_dim.values())) if is_behind else kept_before


def _start_of_indexed(by_dim: dict[int, TracedValue]) -> int:
    """The first dimension of the result that comes from the index tensors."""
    first, last = min(by_dim), max(by_dim)
    are_neighbours = last - first + 1 == len(by_dim)
    return first if are_neighbours else 0


def _index_ndim(indices: Sequence[TracedValue | None]) -> int:
    return max(index.ndim for index in indices if index is not None)
