"""Losses: row by row as long as nothing is reduced."""

from __future__ import annotations

from .rules import broadcast, rule
from .values import Call, Mixing, Refused, State, agree, aligned

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
def entrywise_loss(call: Call) -> State:
    """All entries count alike, so a mean is that of the rows' means."""
    if call["reduction"] == NOT_REDUCED:
        return broadcast(call)
    agree([aligned(value, max(v.ndim for v in call.values())) for value in call.values()])
    return call.part("mean" if call["reduction"] == MEAN else "sum", REDUCES)


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(call: Call) -> tuple[State, ...]:
    """`self` is [N, C, ...], `target` is [N, ...]; the total weight is a sum over the batch.

    A mean divides by what counts in all rows: `loss_terms` writes it otherwise.
    """
    if call["reduction"] != NOT_REDUCED:
        raise Refused(REDUCES)
    call.invariant("weight")
    value, place = call.batched()
    without_classes = place.at(place.dim - (place.dim > 1))
    if value.ndim < 2 or place.dim == 1 or call.rows("target") != without_classes:
        raise Refused("needs the batch in the same place in scores and targets")
    return without_classes, Mixing(str(call.op), "sums the weights of the batch")
