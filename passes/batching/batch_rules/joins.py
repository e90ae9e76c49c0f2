"""Values put together, repeated, padded or moved along a dimension."""

from __future__ import annotations

from dataclasses import replace

from l2l_compile.passes.batching.batch_rules.call import DIFFERENT_DIMENSIONS, Call, Refused, agree, aligned, dims
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows


def _rows_of_all(call: Call) -> list[Rows]:
    """Where the rows of every value stand; refuses a value without rows."""
    places = [value.rows for value in call.values() if value.shape != (0,)]  # cat skips empty vectors
    batched = [rows for rows in places if rows is not None]
    if len(batched) < len(places):
        raise Refused(DIFFERENT_DIMENSIONS)
    return batched


@rule("cat.default")
def cat(call: Call) -> Rows:
    """Along the batch, the rows of the second value come after the rows of the first, so the `outer` counts add up."""
    dim, places = call["dim"] % len(call.out_sizes), _rows_of_all(call)
    along_the_batch = all(rows.dim == dim and rows.multiple == places[0].multiple for rows in places)
    return Rows(dim, places[0].multiple, sum(rows.outer for rows in places)) if along_the_batch else agree(places)


@rule("stack.default")
def stack(call: Call) -> Rows:
    rows = agree(_rows_of_all(call))
    return rows.at(rows.dim + (call["dim"] % len(call.out_sizes) <= rows.dim))


@rule("repeat.default", sizes=("repeats",))
def repeat(call: Call) -> ResultState:
    """Repeats a value as tiles. A value that every row shares becomes one tile per row."""
    rows = aligned(call["self"], len(call.out_sizes))
    if rows is None:
        return call.batch_in_result()
    times = call["repeats"][rows.dim]
    if not isinstance(times, int):
        raise Refused("repeats the batch as often as it has rows")
    return replace(rows, outer=rows.outer * times)


@rule("flip.default")
def flip(call: Call) -> Rows:
    value, rows = call.batched()
    if call["dims"] != [] and rows.dim in dims(call["dims"], value.ndim):
        raise Refused("reverses the order of the rows")
    return rows


@rule("roll.default")
def roll(call: Call) -> Rows:
    value, rows = call.batched()
    if rows.dim in dims(call["dims"], value.ndim):  # no dims: over the flattened value
        raise Refused("moves rows along the batch")
    return rows


@rule("constant_pad_nd.default")
def constant_pad(call: Call) -> Rows:
    """`pad` has two numbers per dimension, beginning with the last dimension."""
    value, rows = call.batched()
    first = 2 * (value.ndim - 1 - rows.dim)
    if any(amount != 0 for amount in call["pad"][first : first + 2]):
        raise Refused("pads the batch")
    return rows


@rule(
    "reflection_pad1d.default",
    "reflection_pad2d.default",
    "reflection_pad3d.default",
    "replication_pad1d.default",
    "replication_pad2d.default",
    "replication_pad3d.default",
)
def mirror_pad(call: Call) -> Rows:
    value, rows = call.batched()
    if rows.dim >= value.ndim - len(call["padding"]) // 2:
        raise Refused("pads the batch")
    return rows


@rule("triu.default", "tril.default")
def triangle(call: Call) -> Rows:
    value, rows = call.batched()
    if rows.dim >= value.ndim - 2:
        raise Refused("cuts a triangle across the batch")
    return rows


@rule("diag_embed.default")
def diag_embed(call: Call) -> Rows:
    """The last dimension becomes the diagonal of the last two dimensions of the result."""
    value, rows = call.batched()
    if dims([call["dim1"], call["dim2"]], value.ndim + 1) != [value.ndim - 1, value.ndim]:
        raise Refused("has no rule for these dimensions")
    if rows.dim == value.ndim - 1:
        raise Refused("lays the batch out on a diagonal")
    return rows
