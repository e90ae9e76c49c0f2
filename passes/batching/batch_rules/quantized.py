"""Products with quantized weights of bitsandbytes: row by row in the activation, with a weight that every row shares.

The operations are found by name, so the library is not imported. Dequantizing a weight reads no rows, and needs no rule. Operations
of torchao are traced as operations of ATen.
"""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, agree
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows

CONTRACTS = "sums over the batch"
OUTLIERS = "looks for columns with outliers in all rows together"


@rule("bitsandbytes::gemm_4bit.default", "bitsandbytes::gemv_4bit.default", "bitsandbytes::int8_linear_matmul.default")
def linear(call: Call) -> Rows:
    """[..., in] with a packed weight of [out, in], its scales, and perhaps a bias."""
    return _activation(call, "A")


def _activation(call: Call, name: str, beside: tuple[str, ...] = ()) -> Rows:
    """Where the rows of an activation stand, if its last dimension is not that of the batch and all but `beside` are invariant."""
    value, rows = call.batched(name)
    call.invariant(*(other for other in call.arguments if other not in (name, *beside)))
    if rows.dim == value.ndim - 1:
        raise Refused(CONTRACTS)
    return rows


@rule("bitsandbytes::int8_scaled_mm.default", "bitsandbytes::int8_mm_dequant.default")
def scaled(call: Call) -> Rows:
    """[rows, in] in int8 with a scale for each row; the weight has a scale for each column of the result."""
    return agree([_activation(call, "A", beside=("row_stats",)), call.rows("row_stats")])


@rule("bitsandbytes::int8_vectorwise_quant.default")
def quantized_rows(call: Call) -> ResultState:
    """[rows, in] to int8, with a scale for each row. The third result is None without a threshold."""
    if call["threshold"]:
        raise Refused(OUTLIERS)
    rows = _activation(call, "A")
    return rows, rows, None


@rule("bitsandbytes::int8_vectorwise_dequant.default")
def dequantized_rows(call: Call) -> Rows:
    return agree([_activation(call, "A", beside=("stats",)), call.rows("stats")])
