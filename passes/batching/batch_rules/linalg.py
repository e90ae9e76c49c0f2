"""Linear algebra on stacks of matrices: every matrix by itself."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, agree, aligned
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState


@rule(
    "linalg_solve_triangular.default",
    "linalg_inv_ex.default",
    "linalg_cholesky_ex.default",
    "linalg_qr.default",
    "linalg_lu_factor_ex.default",
    "linalg_matrix_exp.default",
    "_linalg_solve_ex.default",
    "_linalg_det.default",
    "_linalg_slogdet.default",
    "_linalg_svd.default",
    "_linalg_eigh.default",
    "cholesky_solve.default",
)
def matrices(call: Call) -> ResultState:
    """The last two dimensions are a matrix. The dimensions before count matrices, and broadcast."""
    values = list(call.values())
    ndim = max(value.ndim for value in values)
    if any(value.ndim < 2 for value in values):
        raise Refused("has no rule for vectors")
    rows = agree([aligned(value, ndim) for value in values])
    if rows.dim >= ndim - 2:
        raise Refused("computes with a matrix across the batch")
    return call.each(rows)
