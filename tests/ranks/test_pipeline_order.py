"""Messages between stages on devices whose lanes are threads: every wait is needed, and with all of them the numbers are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipelines import Case, train
from test_order import threads

from l2l_compile import L2LError
from l2l_compile.runtime import messages
from l2l_compile.runtime.messages import Arrival, ArrivingParts

CASES = [Case("llama", torch.float64, options={"device": "cpu"}), Case("u_shape", torch.float64)]


def equal_bits(rank, world, slow):
    for case in CASES:
        alone = train(case)
        with threads(rank, slow):
            staged = train(case, world)
        assert staged.losses == alone.losses
        assert all(torch.equal(weight, alone.weights[name]) for name, weight in staged.weights.items())


@pytest.mark.parametrize("slow", ["", "send", "recv", "compute"])
def test_lanes_that_are_threads_have_the_bits_of_one_rank(ranks, slow):
    ranks.run(equal_bits, slow, world=2, seconds=240)


def no_wait_for_a_part(patch):
    patch.setattr(ArrivingParts, "before", lambda self, micro_batch: ((), ()))


def no_wait_for_all_parts(patch):
    patch.setattr(Arrival, "complete", lambda self, value: None)


def no_end_of_a_message(patch):
    patch.setattr(messages, "_finish", lambda run, values, reads: None)


def no_wait_for_what_is_sent(patch):
    send = messages.send_parts

    def early(run, to, values, parts, *made):
        for value in made:
            value.event = None
        send(run, to, values, parts, *made)

    patch.setattr(messages, "send_parts", early)


BROKEN = {
    "a part is not awaited": (no_wait_for_a_part, "recv"),
    "a value is not awaited": (no_wait_for_all_parts, "recv"),
    "a message is cut off": (no_end_of_a_message, "send"),
    "a part is sent too early": (no_wait_for_what_is_sent, "compute"),
}


def is_missed(rank, world, name, expected):
    breaking, slow = BROKEN[name]
    try:
        with pytest.MonkeyPatch.context() as patch, threads(rank, slow):
            breaking(patch)
            found = train(CASES[0], world).losses
    except (AttributeError, IndexError, TypeError, RuntimeError, L2LError):
        return True
    return found != expected


def alone(rank, world):
    return train(CASES[0]).losses


@pytest.mark.parametrize("name", BROKEN)
def test_each_wait_for_a_message_is_missed(ranks, name):
    expected = ranks.run(alone, world=1)[0]
    assert any(ranks.run(is_missed, name, expected, world=2))


def of_two_ranks(rank, world):
    """What each rank has sent and received."""
    import l2l_compile

    stats = l2l_compile.stats(train(CASES[0], world).compiled)
    told = torch.tensor([stats.sent_bytes, stats.received_bytes])
    dist.all_reduce(told)
    return told.tolist()


def test_what_is_sent_is_received(ranks):
    (sent, received), _ = ranks.run(of_two_ranks, world=2)
    assert sent == received > 0
