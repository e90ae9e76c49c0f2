"""Losses: row by row as long as nothing is reduced."""
from __future__ import annotations

from .rules import broadcast, rule
from .values import Batch, Call, Mixing, Refused, State

NOT_REDUCED = 0  # at::Reduction::None


def _each_row(call: Call) -> None:
    if call["reduction"] != NOT_REDUCED:
        raise Refused("reduces the batch dimension")


@rule("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default", "soft_margin_loss.default",
      "binary_cross_entropy.default", "binary_cross_entropy_with_logits.default")
def entrywise_loss(call: Call) -> State:
    _each_row(call)
    return broadcast(call)


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(call: Call) -> tuple[State, ...]:
    """`self` is [N, C, ...], `target` is [N, ...]; the total weight is a sum over the batch."""
    _each_row(call)
    call.invariant("weight")
    value, place = call.batched()
    if value.ndim < 2 or place.dim != 0 or call.rows("target") != place:
        raise Refused("needs the batch outermost in scores and targets")
    return Batch(0, place.multiple), Mixing(str(call.op), "sums the weights of the batch")
