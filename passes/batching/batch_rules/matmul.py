"""Matrix products: the batch may be in the rows of the result, never in what is summed over."""

from __future__ import annotations

from .rules import rule
from .values import Batch, Call, Refused, State, TracedValue, agree, aligned

CONTRACTS = "sums over the batch"


def product(a: TracedValue, b: TracedValue) -> Batch | None:
    """Where the rows of `a @ b` stand, for matrices or equal stacks of them."""
    last = a.ndim - 1
    if (a.state and a.state.dim == last) or (b.state and b.state.dim == last - 1):
        raise Refused(CONTRACTS)
    if a.state and b.state and (a.state != b.state or a.state.dim >= last - 1):
        raise Refused("multiplies every row with every other")
    if (a.state or b.state).dim < last - 1 and not (a.state and b.state):
        raise Refused("multiplies rows with a value that every row shares, entry by entry")
    return a.state or b.state


@rule("mm.default", "bmm.default", keeps_order=True)
def mm(call: Call) -> State:
    """A product that sums over the batch is the sum of the micro-batches' products."""
    a, b = call["self"], call["mat2"]
    if a.state and b.state and (a.state.dim, b.state.dim) == (a.ndim - 1, b.ndim - 2):
        agree([a.state.at(0), b.state.at(0)])
        return call.part("sum", CONTRACTS)
    return product(a, b)


@rule("addmm.default", "_addmm_activation.default", keeps_order=True)
def addmm(call: Call) -> State:
    return agree([_product_if_batched(call, "mat1", "mat2"), aligned(call["self"], 2)])


@rule("baddbmm.default")
def baddbmm(call: Call) -> State:
    return agree([_product_if_batched(call, "batch1", "batch2"), aligned(call["self"], 3)])


@rule("mv.default")
def mv(call: Call) -> Batch:
    """[M, K] @ [K]."""
    return _matrix_vector(call, "self")


@rule("addmv.default")
def addmv(call: Call) -> Batch:
    return agree([_matrix_vector(call, "mat"), aligned(call["self"], 1)])


def _matrix_vector(call: Call, matrix: str) -> Batch:
    if call.rows("vec") is not None or getattr(call.rows(matrix), "dim", 0) == 1:
        raise Refused(CONTRACTS)
    return call.batched(matrix)[1]


def _product_if_batched(call: Call, one: str, other: str) -> Batch | None:
    if call.rows(one) is None and call.rows(other) is None:
        return None
    return product(call[one], call[other])


@rule("linear.default")
def linear(call: Call) -> Batch:
    """[..., in] with a weight of [out, in]."""
    call.invariant("weight", "bias")
    value, place = call.batched("input")
    if place.dim == value.ndim - 1:
        raise Refused(CONTRACTS)
    return place
