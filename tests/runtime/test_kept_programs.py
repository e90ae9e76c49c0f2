"""What Dynamo keeps of a compiled model ends with the model, or with its place being taken; nothing that may be called is lost."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import l2l_compile
from l2l_compile.host.updates.other_models import updates_with
from lean import forget_sizes
from models import Stack, compiled

WAYS = ["at_step", "in_backward", "in_forward"]


def batch(number=0):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def trained(model, update, steps=2, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=update, **options)
    for number in range(steps):
        step(batch(number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, optimizer


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("update", WAYS)
def test_a_model_that_is_gone_takes_its_optimizer_with_it(update):
    kept, before = [], threading.active_count()
    for _ in range(3):
        model = Stack(2).double()
        step, optimizer = trained(model, update)
        l2l_compile.synchronize(step)
        kept += [weakref.ref(optimizer), weakref.ref(model.head.weight)]
        del model, step, optimizer
        gc.collect()
        assert not any(reference() is not None for reference in kept)
    deadline = threading.Event()
    while threading.active_count() > before + 1 and not deadline.wait(0.05):
        pass  # threads end by themselves


@pytest.mark.parametrize("update", WAYS)
def test_a_model_with_a_new_optimizer_lets_go_of_the_old_one(update):
    model = Stack(2).double()
    eager, kept = copy.deepcopy(model), []
    for _ in range(3):
        step, optimizer = trained(model, update, compile_update=False)
        theirs = torch.optim.AdamW(eager.parameters(), lr=0.1)
        for number in range(2):
            theirs.zero_grad()
            eager(batch(number)).sum().backward()
            theirs.step()
        kept.append(weakref.ref(optimizer))
        del step, optimizer
        gc.collect()
    assert [reference() is not None for reference in kept][:2] == [False, False]
    model.state_dict()  # waits for the updates of the last one
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_two_calls_that_are_there_both_stay():
    model = Stack(2).double()
    one, first = trained(model, "in_forward")
    two, second = trained(model, "in_forward")
    before = graphs()
    for step, optimizer in ((one, first), (two, second), (one, first)):
        step(batch()).sum().backward()
        optimizer.step()
    assert graphs() == before


def test_an_equal_call_in_every_step_compiles_once():
    model = Stack(2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(4):
        step = compiled(model, optimizer=optimizer, update="in_forward")
        step(batch()).sum().backward()
        optimizer.step()
        l2l_compile.synchronize(step)  # once Lightning is imported, torch.compile copies its options, with the optimizer's state
        if not number:
            before = graphs()
    assert graphs() == before


@pytest.mark.parametrize("update", WAYS)
def test_a_step_that_has_begun_is_ended(update):
    """The model is gone before backward, and again before the step of the optimizer."""
    model = Stack(2).double()
    eager = copy.deepcopy(model)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    loss = compiled(model, optimizer=optimizer, update=update)(batch()).sum()
    del model
    gc.collect()
    loss.backward()
    del loss
    gc.collect()
    trained(Stack(3).double(), update)  # where others are looked for that can be released
    optimizer.step()
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    eager(batch()).sum().backward()
    theirs.step()
    if update != "at_step":
        updates_with(optimizer)[0].synchronize()
    for p, q in zip(weights, eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_model_that_is_gone_takes_its_fake_tensors_with_it():
    """A fake tensor holds its sizes in C++, and they hold it through their ShapeEnv: Python's collector does not find that cycle."""

    def made() -> int:
        step = compiled(Stack().double())
        for number in range(2):
            step(batch(number)).sum().backward()
        del step
        forget_sizes()
        gc.collect()
        return sum(type(thing) is FakeTensorMode for thing in gc.get_objects())

    first = made()
    assert made() <= first
