"""The last weights that a forward fetches stay in their slabs, where its backward finds them."""

from __future__ import annotations

import pytest
import torch

import l2l_compile
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Broken, Stack, compiled, pair_of, rows


def fetched(step) -> int:
    return l2l_compile.stats(step).fetched_bytes


def sizes(model) -> list[int]:
    """Bytes of the segments of a stack, in order."""
    return [sum(p.numel() * p.element_size() for p in part.parameters()) for part in (model.embed, *model.layers, model.head)]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow(but=("fp32-0", "bf16-1", "fp32-2", "bf16-7"))
def test_the_last_weights_cross_the_link_once(threaded, prefetch, precision):
    torch._dynamo.reset()
    model = Stack(4) if precision == "bf16" else Stack(4).double()
    pair = pair_of(model, prefetch=prefetch, precision=precision, tolerance=1e-10 if precision == "fp32" else 3e-2)
    for count in (6, 7, 6):
        pair.step(rows(count, dtype=next(model.parameters()).dtype)).check()
        if precision == "fp32":
            assert fetched(pair.compiled) == 2 * sum(sizes(model)) - sum(sizes(model)[-(prefetch + 1) :])
    assert session_of(pair.compiled).device.ledger.held == 0


def alone(call, x):
    return call(x).square().sum()


def test_another_forward_takes_the_slabs(threaded):
    """Two forwards before their backwards, in both orders, and an evaluation in between."""

    def both(first):
        def step(call, x, y):
            a, b = alone(call, x), alone(call, y)
            with torch.no_grad():
                call(x + y)
            for loss in (a, b) if first else (b, a):
                loss.backward()
            return a + b

        return step

    torch._dynamo.reset()
    pair = pair_of(Stack(3).double())
    for first in (True, False, True):
        pair.run(both(first), rows(6), rows(6)).check()
    assert session_of(pair.compiled).device.ledger.held == 0


def test_larger_slabs_of_a_second_program_replace_the_first_ones(threaded):
    """A graph break between two stacks: the second forward runs before the first backward."""
    torch._dynamo.reset()
    model = Broken().double()
    model.second = Stack(3, width=16).double()
    pair = pair_of(model, prefetch=7)
    loss = alone(pair.compiled, rows(6))
    device = session_of(pair.compiled).device
    memory = {slab.untyped_storage().data_ptr() for slab in device.slabs}
    assert {t.untyped_storage().data_ptr() for kept in device.kept.values() for t in kept.tensors} <= memory
    loss.backward()
    pair.compiled.zero_grad()
    pair.step(rows(6)).check()


def test_a_second_backward_fetches_again(threaded):
    def twice(call, x):
        loss = alone(call, x)
        loss.backward(retain_graph=True)
        loss.backward()

    torch._dynamo.reset()
    pair_of(Stack(3).double()).run(twice, rows(6)).check()


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_updated_weights_are_not_taken_for_those_before(threaded, update):
    torch._dynamo.reset()
    l2l_compile.testing.training_equivalent(
        Stack(3).double(),
        [rows(6) for _ in range(4)],
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        updates=(update,),
        options={"micro_batches": 3, "block_compiler": "eager"},
        loss=lambda outputs: outputs.pow(2).mean(),
    )


def test_a_forward_that_is_given_up_leaves_nothing_to_later_ones(threaded):
    torch._dynamo.reset()
    pair = pair_of(Stack(3).double(), prefetch=7)  # a slab for each segment
    x = rows(6)
    alone(pair.compiled, x)
    with torch.no_grad():
        for p, q in zip(pair.compiled.parameters(), pair.eager.parameters(), strict=True):
            p.mul_(1.5)
            q.mul_(1.5)
    pair.step(x).check()


def test_a_step_that_fails_leaves_nothing(threaded, monkeypatch):
    torch._dynamo.reset()
    pair = pair_of(Stack(3).double())
    loss = alone(pair.compiled, rows(6))
    device = session_of(pair.compiled).device
    assert isinstance(device, ThreadedDevice) and len(device.kept) == 2

    def fails(*_):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(device, "push", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
    assert not device.kept and device.ledger.held == 0
    pair.compiled.zero_grad()
    pair.step(rows(6)).check()


def test_the_host_as_its_own_device_keeps_nothing():
    model = Stack(4)
    step = compiled(model, device="cpu")
    step(rows(6, dtype=torch.float32)).sum().backward()
    assert fetched(step) == 2 * sum(sizes(model)) and not session_of(step).device.kept
