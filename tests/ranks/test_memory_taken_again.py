"""A GPU's allocator gives memory that compute has released to the lane `comm`, before compute has got there: `comm` waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from steps import sharded, whole
from test_global import Centered
from test_mean import numbers
from test_order import threads

from l2l_compile import RaceError, session
from l2l_compile.ir import nodes
from l2l_compile.runtime.executor import HANDLERS, Executor
from models import Stack
from waits import BY_NAME

WAIT = BY_NAME["runtime.executor.Executor.submit_behind_releases: self.device.lanes[lane].wait(released)"]
CASES = {"per_rank": (Stack, "d2h"), "global": (Centered, "compute")}  # a model, and the lane that reads what `comm` makes


@contextmanager
def memory_is_taken_again(taker: str = "comm") -> Iterator[None]:
    """As on a GPU: what a lane makes next lies in the memory of its values that a `release` has been given for."""
    release, submit = HANDLERS[nodes.release], Executor.submit_behind_releases
    free: list = []

    def releasing(run, node, x):
        if x.lane == taker and x.slab is None:
            free.append(x)
        return release(run, node, x)

    def taking(run, lane, reads, fills, work):
        taken = free[:]
        free.clear()

        def overwrite_and_work():
            for value in taken:
                for tensor in value.tensors or ():
                    if tensor is not None:
                        tensor.fill_(float("nan"))
            work()

        submit(run, lane, reads, fills, overwrite_and_work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HANDLERS, nodes.release, releasing)
        patch.setattr(Executor, "submit_behind_releases", taking)
        yield


def gradients(rank: int, world: int, meaning: str) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()  # the code of an earlier model would run on its device
    torch.manual_seed(0)
    kind, _ = CASES[meaning]
    model, step = sharded(kind(*[3] if kind is Stack else []).double(), world, batch_scope=meaning)[1:]
    output = step(numbers(rank, 0))
    (output[0] if isinstance(output, tuple) else output.pow(2).mean()).backward()
    return whole(model, gradients=True)


def the_watch_refuses_a_program_without_the_wait(rank, world, meaning):
    with WAIT.deleted(), pytest.raises(RaceError, match="comm"):
        gradients(rank, world, meaning)


def its_absence_shows_on_slow_threads(rank, world, meaning):
    expected = gradients(rank, world, meaning)
    with pytest.MonkeyPatch.context() as patch, threads(rank, slow=CASES[meaning][1]):
        patch.setattr(session, "open_device", session.plain_open)
        with memory_is_taken_again():
            for name, gradient in gradients(rank, world, meaning).items():
                assert torch.equal(gradient, expected[name]), name
        with WAIT.deleted(), memory_is_taken_again():
            found = gradients(rank, world, meaning)
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("meaning", CASES)
def test_the_watch_refuses_a_program_without_the_wait(ranks, meaning):
    ranks.run(the_watch_refuses_a_program_without_the_wait, meaning)


@pytest.mark.parametrize("meaning", CASES)
@pytest.mark.slow(only="global")
def test_its_absence_shows_on_slow_threads(ranks, meaning):
    ranks.run(its_absence_shows_on_slow_threads, meaning)
