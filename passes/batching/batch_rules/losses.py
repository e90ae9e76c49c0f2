"""Losses: row by row without a reduction; some reductions give partial sums."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, agree, aligned
from l2l_compile.passes.batching.batch_rules.rules import broadcast, rule
from l2l_compile.passes.batching.batch_rules.states import Mixing, ResultState, ValueState

REDUCES = "reduces the batch dimension"
NOT_REDUCED, MEAN, SUM = 0, 1, 2  # at::Reduction


@rule(
    "mse_loss.default",
    "smooth_l1_loss.default",
    "huber_loss.default",
    "soft_margin_loss.default",
    "binary_cross_entropy.default",
    "binary_cross_entropy_with_logits.default",
)
def entrywise_loss(call: Call) -> ResultState:
    """All entries have the same weight, so a mean over the batch is the mean of the rows' means."""
    if call["reduction"] == NOT_REDUCED:
        return broadcast(call)
    ndim = max(value.ndim for value in call.values())
    agree([aligned(value, ndim) for value in call.values()])
    return call.partial("mean" if call["reduction"] == MEAN else "sum", REDUCES)


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(call: Call) -> tuple[ValueState, ...]:
    """`self` is [N, C, ...], `target` is [N, ...]; the total weight is a sum over the batch.

    A mean divides by the number of targets in all rows that are not ignored; the pass `gather_loss_terms` rewrites it.
    """
    if call["reduction"] != NOT_REDUCED:
        raise Refused(REDUCES)
    call.invariant("weight")
    value, rows = call.batched()
    without_classes = rows.at(rows.dim - (rows.dim > 1))
    if value.ndim < 2 or rows.dim == 1 or call.rows("target") != without_classes:
        raise Refused("needs the batch in the same place in scores and targets")
    return without_classes, Mixing(str(call.op), "sums the weights of the batch")
