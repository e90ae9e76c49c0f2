"""Recurrent layers: each row of the batch is a sequence of its own."""

from __future__ import annotations

import l2l_compile.frontend.recurrent  # noqa: F401 - defines the operator

from .rules import rule
from .values import Batch, Call, Refused, agree


@rule("l2l_compile::recurrent_layer.default")
def recurrent_layer(call: Call) -> tuple[Batch, ...]:
    """[batch, time, features] or [time, batch, features], with states of [directions, batch, hidden]."""
    value, place = call.batched("input")
    if any(weight.state is not None for weight in call["weights"]):
        raise Refused("takes rows of the batch as its 'weights'")
    if place.dim != (0 if call["batch_first"] else 1):
        raise Refused("carries a state from row to row" if place.dim != value.ndim - 1 else "sums over the batch")
    states = [state.state for state in call["states"]]
    if None in states:
        raise Refused("combines rows that stand in different dimensions")
    rows = agree([place.at(1), *states])
    return (rows.at(place.dim), *[rows] * len(states))
