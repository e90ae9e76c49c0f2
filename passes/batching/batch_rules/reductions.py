"""Reductions and scans along a dimension: row by row along every dimension other than the batch dimension."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, agree, dims
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState

REDUCES = "reduces the batch dimension"


_ADDS = {
    "sum": "sum",
    "nansum": "sum",
    "count_nonzero": "sum",
    "dot": "sum",
    "vdot": "sum",
    "mean": "mean",
}  # the ops that add rows up


def _over_rows(call: Call) -> ResultState:
    """A sum over all rows is the sum of the micro-batches' sums. Other reductions need all rows at once."""
    how = _ADDS.get(call.op._schema.name.removeprefix("aten::"))
    if how is None:
        raise Refused(REDUCES)
    return call.partial(how, REDUCES)


def _reduce(call: Call, over: list[int], keepdim: bool) -> ResultState:
    _, rows = call.batched()
    if rows.dim in over:
        return _over_rows(call)
    return call.each(rows if keepdim else rows.at(rows.dim - sum(dim < rows.dim for dim in over)))


@rule("argmax.default", "argmin.default", keeps_order=True, gives_positions=True)
@rule(
    "sum.dim_IntList",
    "mean.dim",
    "nansum.default",
    "amax.default",
    "amin.default",
    "var.correction",
    "std.correction",
    "var_mean.correction",
    "std_mean.correction",
    "prod.dim_int",
    "any.dim",
    "any.dims",
    "all.dim",
    "all.dims",
    "max.dim",
    "min.dim",
    "aminmax.default",
    "logsumexp.default",
    "linalg_vector_norm.default",
    "norm.ScalarOpt_dim",
    "norm.ScalarOpt_dim_dtype",
    "median.dim",
    "nanmedian.dim",
    "mode.default",
    "kthvalue.default",
    "count_nonzero.dim_IntList",
    keeps_order=True,
)
def reduce_dims(call: Call) -> ResultState:
    value, _ = call.batched()
    return _reduce(call, dims(call["dim"], value.ndim), bool(call["keepdim"]))


@rule(
    "sum.default",
    "mean.default",
    "prod.default",
    "any.default",
    "all.default",
    "max.default",
    "min.default",
    "median.default",
    "nanmedian.default",
    "norm.Scalar",
    "norm.ScalarOpt_dtype",
    "count_nonzero.default",
    "dot.default",
    "vdot.default",
    "trace.default",
)
def reduce_all(call: Call) -> ResultState:
    agree([value.rows for value in call.values()])
    return _over_rows(call)


@rule("topk.default", keeps_order=True, gives_positions=True)
@rule(
    "_softmax.default",
    "_log_softmax.default",
    "_safe_softmax.default",
    "cumsum.default",
    "cumprod.default",
    "logcumsumexp.default",
    "cummax.default",
    "cummin.default",
    "glu.default",
    "_fft_r2c.default",
    "_fft_c2c.default",
    "_fft_c2r.default",
    keeps_order=True,
)
def along(call: Call) -> ResultState:
    """Computes along `dim`, separately for each position in the other dimensions. `dim` stays, possibly with another size."""
    value, rows = call.batched()
    if rows.dim in dims(call["dim"], value.ndim):
        raise Refused("computes along the batch dimension")
    return call.each(rows)
