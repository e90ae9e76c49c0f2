"""Other views of the same entries: reshapes, permutations and cuts."""

from __future__ import annotations

import math
import sys

from .rules import rule
from .values import USES_BATCH_AS_NUMBER, Batch, Call, Refused, State, Varying, aligned, dims

CUTS = "takes some rows of the batch"


@rule("_conj.default", "_neg_view.default", "view_as_real.default", "view_as_complex.default", keeps_order=True)
@rule("alias.default", "detach.default", keeps_row_ids=True, keeps_order=True)
def same_dims(call: Call) -> Batch:
    """Leading dimensions stay where they are."""
    return call.batched()[1]


@rule("view.default", "_unsafe_view.default", "_reshape_alias.default", sizes=("size", "stride"), keeps_row_ids=True)
def reshape(call: Call) -> Batch:
    """As many entries stand before the rows as did, in dimensions before theirs or outermost in it."""
    value, place = call.batched()
    result = call.batch_in_result()
    if result is None:
        raise Refused("does not keep the rows of the batch in one dimension")
    before = math.prod(size for size, _ in value.sizes[: place.dim]) * place.outer
    ahead = math.prod(size for size, _ in call.out_sizes[: result.dim])
    outer, rest = divmod(before, ahead) if ahead else (0, 0)
    if rest or outer < 1 or result.factor % outer:
        raise Refused("folds the batch behind another dimension")
    return Batch(result.dim, result.factor // outer, outer, upper_bound=place.upper_bound)


@rule("view.dtype")
def reinterpret(call: Call) -> Batch:
    """Bytes of the last dimension read as another dtype."""
    value, place = call.batched()
    if place.dim == value.ndim - 1:
        raise Refused("reads several rows as one entry")
    return place


@rule("expand.default", sizes=("size",), keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def expand(call: Call) -> State:
    """Repeats entries; a value that every row shares gets the rows of the dimension it is expanded to."""
    place = aligned(call["self"], len(call.out_sizes))
    return call.batch_in_result(equal_entries=True) if place is None else place


@rule("unsqueeze.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def unsqueeze(call: Call) -> Batch:
    value, place = call.batched()
    added = call["dim"] % (value.ndim + 1)
    return place.at(place.dim + (added <= place.dim))


@rule("squeeze.dim", "squeeze.dims", keeps_row_ids=True, keeps_order=True)
def squeeze(call: Call) -> Batch:
    value, place = call.batched()
    asked = dims(call["dim"], value.ndim) if call["dim"] != [] else []
    if place.dim in asked:
        raise Refused("drops the batch dimension of a micro-batch of one row")
    return place.at(place.dim - sum(value.shape[dim] == 1 for dim in asked if dim < place.dim))


@rule("squeeze.default")
def squeeze_all(call: Call) -> State:
    raise Refused("drops the batch dimension of a micro-batch of one row")


@rule("permute.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def permute(call: Call) -> Batch:
    value, place = call.batched()
    order = [dim % value.ndim for dim in call["dims"]]
    return place.at(order.index(place.dim))


@rule("transpose.int", "t.default", keeps_row_ids=True, keeps_order=True, keeps_equal_entries=True)
def transpose(call: Call) -> Batch:
    value, place = call.batched()
    one, other = (0, value.ndim - 1) if call["dim0"] is None else (call["dim0"] % value.ndim, call["dim1"] % value.ndim)
    return place.at({one: other, other: one}.get(place.dim, place.dim))


@rule("select.int", "unbind.int", keeps_row_ids=True, keeps_order=True)
def take_out(call: Call) -> State | tuple[State, ...]:
    """Drops one dimension, at one position or at each."""
    value, place = call.batched()
    dim = call["dim"] % value.ndim
    if dim == place.dim:
        raise Refused(CUTS)
    state = place.at(place.dim - (dim < place.dim))
    return (state,) * len(call.small_out) if isinstance(call.small_out, (list, tuple)) else state


@rule("slice.Tensor", sizes=("end",), keeps_row_ids=True, keeps_order=True)
def slice_along(call: Call) -> Batch:
    """A slice of another dimension, or all of the batch: `x[:]` and `x[:B]`, not `x[:100]`, which holds up to 100 rows."""
    value, place = call.batched()
    start, end, step = call["start"], call["end"], call["step"]
    if call["dim"] % value.ndim != place.dim:
        if isinstance(end, Varying):
            raise Refused(USES_BATCH_AS_NUMBER)
        return place
    whole = end is None or end == sys.maxsize or (isinstance(end, Varying) and (end.small, end.large) == value.sizes[place.dim])
    if start not in (None, 0) or step != 1 or not whole:
        raise Refused(CUTS)
    return place


@rule(
    "split.Tensor",
    "split_with_sizes.default",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes.default",
    keeps_row_ids=True,
    keeps_order=True,
)
def split(call: Call) -> tuple[State, ...]:
    value, place = call.batched()
    if call["dim"] % value.ndim == place.dim:
        raise Refused(CUTS)
    return (place,) * len(call.small_out)


@rule("unfold.default")
def unfold(call: Call) -> Batch:
    """Windows over another dimension; the window becomes the last."""
    value, place = call.batched()
    if call["dimension"] % value.ndim == place.dim:
        raise Refused("slides a window over the batch")
    return place


@rule("diagonal.default")
def diagonal(call: Call) -> Batch:
    value, place = call.batched()
    taken = dims([call["dim1"], call["dim2"]], value.ndim)
    if place.dim in taken:
        raise Refused("takes a diagonal across the batch")
    return place.at(place.dim - sum(dim < place.dim for dim in taken))


@rule("as_strided.default", sizes=("size", "stride"))
def strided(call: Call) -> Batch:
    """Windows over contiguous memory, [outer, rows, inner], that do not reach from a row into the next.

    A stride is a number of steps along `outer` and a rest along `inner`.
    """
    value, place = call.batched()
    result = call.batch_in_result()
    if result is None or place.outer != 1 or call["storage_offset"] not in (None, 0):
        raise Refused(CUTS)
    inner = place.multiple * math.prod(value.shape[place.dim + 1 :])
    windows = []
    for source, made, batch in ((value.small, call.small_out, call.small_batch), (value.large, call.large_out, call.large_batch)):
        steps = list(zip(made.shape, made.stride(), strict=True))
        apart = steps.pop(result.dim)[1]
        windows.append([(size, *divmod(stride, batch * inner)) for size, stride in steps if size != 1])
        reach = 1 + sum((size - 1) * rest for size, _, rest in windows[-1])
        if not source.is_contiguous() or source.storage_offset() or apart * result.multiple != inner or reach > apart:
            raise Refused("reads other rows, or memory that is not laid out row by row")
    if windows[0] != windows[1]:
        raise Refused(USES_BATCH_AS_NUMBER)
    return result


@rule("as_strided_.default", sizes=("size", "stride"), leaves_sizes=True)
def restride(call: Call) -> Batch:
    """Changes the strides of dimensions of one entry, and nothing else (average pooling to one, channels last)."""
    value, place = call.batched()
    for before, after in ((value.small, call.small_out), (value.large, call.large_out)):
        strides = zip(before.shape, before.stride(), after.stride(), strict=False)
        if before.shape != after.shape or any(size != 1 and old != new for size, old, new in strides):
            raise Refused("lays the rows out in memory anew")
    if call["storage_offset"] is not None:
        raise Refused("lays the rows out in memory anew")
    return place


@rule("slice_scatter.default", "select_scatter.default")
def write_back(call: Call) -> Batch:
    """A copy with one slice of another dimension replaced."""
    value, place = call.batched()
    dim = call["dim"] % value.ndim
    if dim == place.dim:
        raise Refused("writes some rows of the batch")
    source = call.rows("src")
    dropped = dim < place.dim and call["src"].ndim < value.ndim
    if source != place.at(place.dim - dropped):
        raise Refused("combines rows that stand in different dimensions")
    return place
