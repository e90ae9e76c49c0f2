"""Values put together, repeated, padded or moved along a dimension."""

from __future__ import annotations

from dataclasses import replace

from .rules import rule
from .values import Batch, Call, Refused, State, agree, aligned, dims


def _with_equal_rows(call: Call) -> Batch:
    places = [value.state for value in call.values() if value.shape != (0,)]  # cat skips empty vectors
    if None in places:
        raise Refused("combines rows that stand in different dimensions")
    return agree(places)


@rule("cat.default")
def cat(call: Call) -> Batch:
    """Along the batch, the rows of the second value come after those of the first: one more `outer` run of them."""
    dim = call["dim"] % len(call.out_sizes)
    places = [value.state for value in call.values() if value.shape != (0,)]
    if None in places or any(place.dim != dim or place.multiple != places[0].multiple for place in places):
        return _with_equal_rows(call)
    return Batch(dim, places[0].multiple, sum(place.outer for place in places))


@rule("stack.default")
def stack(call: Call) -> Batch:
    place = _with_equal_rows(call)
    return place.at(place.dim + (call["dim"] % len(call.out_sizes) <= place.dim))


@rule("repeat.default", sizes=("repeats",))
def repeat(call: Call) -> State:
    """Tiles; a value that every row shares becomes one tile a row."""
    place = aligned(call["self"], len(call.out_sizes))
    if place is None:
        return call.batch_in_result()
    times = call["repeats"][place.dim]
    if not isinstance(times, int):
        raise Refused("repeats the batch as often as it has rows")
    return replace(place, outer=place.outer * times)


@rule("flip.default")
def flip(call: Call) -> Batch:
    value, place = call.batched()
    if call["dims"] != [] and place.dim in dims(call["dims"], value.ndim):
        raise Refused("reverses the order of the rows")
    return place


@rule("roll.default")
def roll(call: Call) -> Batch:
    value, place = call.batched()
    if place.dim in dims(call["dims"], value.ndim):  # no dims: over the flattened value
        raise Refused("moves rows along the batch")
    return place


@rule("constant_pad_nd.default")
def constant_pad(call: Call) -> Batch:
    """`pad` counts dimensions from the last, two numbers each."""
    value, place = call.batched()
    first = 2 * (value.ndim - 1 - place.dim)
    if any(amount != 0 for amount in call["pad"][first : first + 2]):
        raise Refused("pads the batch")
    return place


@rule(
    "reflection_pad1d.default",
    "reflection_pad2d.default",
    "reflection_pad3d.default",
    "replication_pad1d.default",
    "replication_pad2d.default",
    "replication_pad3d.default",
)
def mirror_pad(call: Call) -> Batch:
    value, place = call.batched()
    if place.dim >= value.ndim - len(call["padding"]) // 2:
        raise Refused("pads the batch")
    return place


@rule("triu.default", "tril.default")
def triangle(call: Call) -> Batch:
    value, place = call.batched()
    if place.dim >= value.ndim - 2:
        raise Refused("cuts a triangle across the batch")
    return place


@rule("diag_embed.default")
def diag_embed(call: Call) -> Batch:
    """The last dimension becomes the diagonal of the two last."""
    value, place = call.batched()
    if dims([call["dim1"], call["dim2"]], value.ndim + 1) != [value.ndim - 1, value.ndim]:
        raise Refused("has no rule for these dimensions")
    if place.dim == value.ndim - 1:
        raise Refused("lays the batch out on a diagonal")
    return place
