"""Loops whose `optimizer.step()` the user has compiled, by itself or in a function around it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import l2l_compile
from models import Stack, compiled, rows

MODES = ("in_forward", "in_backward", "at_step")


def step_alone(optimizer, **how):
    return torch.compile(optimizer.step, backend="eager", **how)


def step_in_a_function(optimizer, **how):
    def step():
        optimizer.step()

    return torch.compile(step, backend="eager", **how)


def step_and_zero_grad(optimizer, **how):
    def step():
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend="eager", **how)


def pair(update):
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    return plain, model, optimizers, compiled(model, optimizer=optimizers[1], update=update)


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("make", [step_alone, step_in_a_function, step_and_zero_grad])
def test_a_compiled_step_has_eagers_numbers_and_warns_of_nothing(make, update):
    plain, model, optimizers, streamed = pair(update)
    step = make(optimizers[1])
    for _ in range(3):
        x = rows(4)
        plain(x).pow(2).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        streamed(x).pow(2).mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        assert not [w for w in caught if "l2l" in str(w.message) or "Dynamo does not know" in str(w.message)]
        optimizers[1].zero_grad()
    l2l_compile.synchronize(streamed)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [step_alone, step_in_a_function])
def test_a_step_in_a_full_graph_is_refused_with_the_reason(make):
    _, _, optimizers, streamed = pair("in_forward")
    streamed(rows(4)).pow(2).mean().backward()
    with pytest.raises(Unsupported, match="leave the call out of what fullgraph=True compiles"):
        make(optimizers[1], fullgraph=True)()


def test_compiled_code_before_the_step_is_still_a_warning():
    """It may have read parameters, which are updated already. Said when the step shows that the code was not the step."""
    _, model, optimizers, streamed = pair("in_backward")
    reads = torch.compile(lambda parameters: [p * 2 for p in parameters], backend="eager")
    streamed(rows(4)).pow(2).mean().backward()
    reads(list(model.parameters()))
    with pytest.warns(UserWarning, match="between backward and optimizer.step.*'in_backward' has updated it"):
        optimizers[1].step()


def test_the_compiled_step_of_another_optimizer_stays_one_graph():
    """But for the break that PyTorch's optimizers make by themselves."""
    torch._dynamo.reset()  # a step that another test has compiled would not break again
    _, _, optimizers, streamed = pair("in_backward")
    streamed(rows(4)).pow(2).mean().backward()
    optimizers[1].step()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    counters.clear()
    step_alone(torch.optim.SGD(other.parameters(), lr=0.1))()
    assert len(counters["graph_break"]) == 1 and "graph_break()" in next(iter(counters["graph_break"]))
