"""Look-ups: in a table that every row shares, within each row, or with `arange(B)` for the batch dimension."""

from __future__ import annotations

import torch

from .rules import rule
from .values import Batch, Call, Refused, RowIds, TracedValue, agree, aligned

PICKS = "picks rows by number"


@rule("embedding.default")
def embedding(call: Call) -> Batch:
    """Table [entries, features] and indices [...]."""
    call.invariant("weight")
    return call.batched("indices")[1]


@rule("index_select.default")
def index_select(call: Call) -> Batch:
    value, index = call["self"], call.rows("index")
    dim = call["dim"] % max(value.ndim, 1)
    if value.state is None:
        return index.at(dim)
    if index is not None or value.state.dim == dim:
        raise Refused(PICKS)
    return value.state


@rule("gather.default")
def gather(call: Call) -> Batch:
    """`out[i][j] = self[i][index[i][j]]` along `dim`: positions in the other dimensions are kept."""
    value, index = call["self"], call["index"]
    dim = call["dim"] % max(value.ndim, 1)
    if value.state is None:
        if index.state.dim != dim:
            raise Refused("reads an entry for each row from a value that every row shares")
        return index.state
    if value.state != index.state or value.state.dim == dim:
        raise Refused(PICKS)
    return value.state


@rule("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add.default", "scatter_reduce.two")
def scatter(call: Call) -> Batch:
    """The counterpart of gather: every row writes into itself."""
    value, place = call.batched()
    if place.dim == call["dim"] % value.ndim:
        raise Refused("writes rows by number")
    sources = [call.rows(name) for name in ("index", "src") if isinstance(call[name], TracedValue)]
    if None in sources:
        raise Refused("combines rows that stand in different dimensions")
    return agree([place, *sources])


@rule("index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce.default")
def write_positions(call: Call) -> Batch:
    """Writes positions of another dimension, the same ones in every row."""
    call.invariant("index", "value")
    value, place = call.batched()
    if place.dim == call["dim"] % value.ndim:
        raise Refused("writes rows by number")
    if call["source"] is not None and call.rows("source") != place:
        raise Refused("combines rows that stand in different dimensions")
    return place


@rule("index.Tensor", "_unsafe_index.Tensor", reads_row_ids=True)
def index(call: Call) -> Batch:
    return advanced_index(call["self"], call["indices"])


@rule("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default", reads_row_ids=True)
def index_put(call: Call) -> Batch:
    """Writes `values`, broadcast, to where `index` would read."""
    value, place = call.batched()
    if isinstance(place, RowIds) or isinstance(call.rows("values"), RowIds):
        raise Refused("computes with the number of a row")
    if _masks(call["indices"]):
        return _fill_masked(call, value, place)
    read = advanced_index(value, call["indices"])
    ndim = value.ndim - sum(i is not None for i in call["indices"]) + _index_ndim(call["indices"])
    agree([read, aligned(call["values"], ndim)])
    return place


def _masks(indices: list[TracedValue | None]) -> bool:
    return any(index is not None and index.small.dtype in (torch.bool, torch.uint8) for index in indices)


def _fill_masked(call: Call, value: TracedValue, place: Batch) -> Batch:
    """`x[mask] = v`: row by row if every entry that the mask picks gets the same `v`."""
    given = [(position, index) for position, index in enumerate(call["indices"]) if index is not None]
    (position, mask), values = given[0], call["values"]
    if len(given) > 1 or values.state is not None or values.ndim > value.ndim - mask.ndim:
        raise Refused("picks as many entries as the data says")
    if mask.state is not None and mask.state.at(mask.state.dim + position) != place:
        raise Refused("combines rows that stand in different dimensions")
    return place


def advanced_index(value: TracedValue, indices: list[TracedValue | None]) -> Batch:
    """Where the rows of `value[indices]` stand: numpy's rules, with tensors or None for each leading dimension.

    Index tensors broadcast together to `k` dimensions; these take the place of the indexed dimensions where those are
    neighbours, and come first where they are not.
    """
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if _masks(indices):
        raise Refused("picks as many entries as the data says")
    if isinstance(value.state, RowIds):
        raise Refused("computes with the number of a row")
    k = _index_ndim(indices)
    first, last = min(given), max(given)
    start = first if last - first + 1 == len(given) else 0
    own = value.state.dim if value.state else None
    for dim, index in given.items():
        if isinstance(index.state, RowIds) and (dim != own or value.state.factor != 1):
            raise Refused("computes with the number of a row")
    batched = [i for i in given.values() if i.state is not None]
    places = [i.state if isinstance(i.state, Batch) else Batch(i.state.dim) for i in batched]
    indexed = agree([p.at(p.dim + k - i.ndim) for p, i in zip(places, batched, strict=True)])
    if own is not None and own not in given:
        if indexed is not None:
            raise Refused("looks every row's indices up in every row")
        before = own - sum(dim < own for dim in given)
        return value.state.at(before + k if before >= start else before)
    if own is not None and not isinstance(given[own].state, RowIds):
        raise Refused(PICKS)
    return indexed.at(start + indexed.dim)


def _index_ndim(indices: list[TracedValue | None]) -> int:
    return max(index.ndim for index in indices if index is not None)
