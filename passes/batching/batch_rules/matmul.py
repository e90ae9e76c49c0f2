"""Matrix products: the batch may be a dimension of the result. Only `mm` and `bmm` may sum over it, to a partial sum."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, TracedValue, agree, aligned
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows

CONTRACTS = "sums over the batch"


def product(a: TracedValue, b: TracedValue) -> Rows | None:
    """Where the rows of `a @ b` stand, for matrices or equal stacks of them; None if both are invariant."""
    lines, columns = a.ndim - 2, a.ndim - 1  # the dimensions of a matrix; the dimensions before count matrices
    if _dim(a) == columns or _dim(b) == lines:
        raise Refused(CONTRACTS)
    if a.rows is None or b.rows is None:
        rows = a.rows or b.rows
        if rows is not None and rows.dim < lines:
            raise Refused("multiplies rows with a value that every row shares, entry by entry")
        return rows
    if a.rows != b.rows or a.rows.dim >= lines:
        raise Refused("multiplies every row with every other")
    return a.rows


def _dim(value: TracedValue) -> int | None:
    return None if value.rows is None else value.rows.dim


@rule("mm.default", "bmm.default", keeps_order=True)
def mm(call: Call) -> ResultState:
    """A product that sums over the batch is the sum of the micro-batches' products."""
    a, b = call["self"], call["mat2"]
    if a.rows is not None and b.rows is not None and a.rows.dim == a.ndim - 1 and b.rows.dim == b.ndim - 2:
        agree([a.rows.at(0), b.rows.at(0)])
        return call.partial("sum", CONTRACTS)
    return product(a, b)


@rule("addmm.default", "_addmm_activation.default", keeps_order=True)
def addmm(call: Call) -> ResultState:
    return agree([product(call["mat1"], call["mat2"]), aligned(call["self"], 2)])


@rule("baddbmm.default")
def baddbmm(call: Call) -> ResultState:
    return agree([product(call["batch1"], call["batch2"]), aligned(call["self"], 3)])


@rule("mv.default")
def mv(call: Call) -> Rows:
    """[M, K] @ [K]."""
    return _matrix_vector(call, "self")


@rule("addmv.default")
def addmv(call: Call) -> Rows:
    return agree([_matrix_vector(call, "mat"), aligned(call["self"], 1)])


def _matrix_vector(call: Call, matrix: str) -> Rows:
    if call.rows("vec") is not None:
        raise Refused(CONTRACTS)
    _, rows = call.batched(matrix)
    if rows.dim == 1:
        raise Refused(CONTRACTS)
    return rows


@rule("linear.default")
def linear(call: Call) -> Rows:
    """[..., in] with a weight of [out, in]."""
    call.invariant("weight", "bias")
    value, rows = call.batched("input")
    if rows.dim == value.ndim - 1:
        raise Refused(CONTRACTS)
    return rows
