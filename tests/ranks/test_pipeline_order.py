"""Messages between stages on devices whose lanes are threads: the numbers are right, whatever lane is slow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipelines import Case, train
from test_order import threads

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
