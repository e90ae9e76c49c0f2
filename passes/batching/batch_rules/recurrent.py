"""Recurrent layers: each row of the batch is a sequence of its own."""

from __future__ import annotations

import l2l_compile.ir.recurrent_operator  # noqa: F401 - defines the operator
from l2l_compile.passes.batching.batch_rules.call import DIFFERENT_DIMENSIONS, Call, Refused, agree
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import Rows


@rule("l2l_compile::recurrent_layer.default")
def recurrent_layer(call: Call) -> tuple[Rows, ...]:
    """[batch, time, features] or [time, batch, features], with states of [directions, batch, hidden]."""
    value, rows = call.batched("input")
    if any(weight.state is not None for weight in call["weights"]):
        raise Refused("takes rows of the batch as its 'weights'")
    if rows.dim != (0 if call["batch_first"] else 1):
        raise Refused("carries a state from row to row" if rows.dim != value.ndim - 1 else "sums over the batch")
    states = [state.rows for state in call["states"]]
    if None in states:
        raise Refused(DIFFERENT_DIMENSIONS)
    of_state = agree([rows.at(1), *states])
    return (of_state.at(rows.dim), *[of_state] * len(states))
