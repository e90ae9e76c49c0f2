"""Values put together, repeated, padded or moved along a dimension."""
from __future__ import annotations

from .rules import rule
from .values import Batch, Call, Refused, State, aligned, dims


def _alike(call: Call) -> Batch:
    places = {value.state for value in call.values() if value.shape != (0,)}  # cat skips empty vectors
    if len(places) != 1 or None in places:
        raise Refused("combines rows that stand in different dimensions")
    return places.pop()


@rule("cat.default")
def cat(call: Call) -> Batch:
    place = _alike(call)
    if call["dim"] % len(call.out_sizes) == place.dim:
        raise Refused("joins values along the batch")
    return place


@rule("stack.default")
def stack(call: Call) -> Batch:
    place = _alike(call)
    return Batch(place.dim + (call["dim"] % len(call.out_sizes) <= place.dim), place.multiple)


@rule("repeat.default", sizes=("repeats",))
def repeat(call: Call) -> State:
    """Tiles; a value that every row shares becomes one tile a row."""
    place = aligned(call["self"], len(call.out_sizes))
    if place is None:
        result = call.batch_in_result()
        value = call["self"]
        tile = ([1] * (len(call.out_sizes) - value.ndim) + list(value.shape))[result.dim] if result else 1
        # A tile holds `tile` entries; a multiple of it (repeat(3 * B)) is several tiles a row, still row by row.
        if result is not None and result.multiple % max(tile, 1):
            raise Refused("does not repeat once for each row")
        return result
    if call["repeats"][place.dim] != 1:
        raise Refused("repeats the batch as a whole")
    return place


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
    if any(amount != 0 for amount in call["pad"][first:first + 2]):
        raise Refused("pads the batch")
    return place


@rule("reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default", "replication_pad1d.default",
      "replication_pad2d.default", "replication_pad3d.default")
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
