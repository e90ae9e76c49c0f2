"""With `update="in_forward"`, updates are put off: what happens to parameters meanwhile."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.session import session_of
from models import Stack, compiled, rows


def clamp(model):
    for data in model.held:
        data.clamp_(-0.01, 0.01)


HELD_WRITES = {  # through tensors that were taken from parameters before
    "clamp": clamp,
    "scale": lambda model: model.held[3].mul_(0.5),
    "one row in four": lambda model: model.held[0][::4].zero_(),
    "state": lambda model: model.optimizer.state.clear(),
    "its place in the optimizer": lambda model: model.optimizer.param_groups[0].update(params=list(model.head.parameters())),
}


@pytest.mark.parametrize("compile_update", [True, False])
def test_a_held_write_is_an_error_only_before_the_update(compile_update):
    model = Stack(2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    object.__setattr__(model, "optimizer", optimizer)
    object.__setattr__(model, "held", [p.data for p in model.parameters()])
    step = compiled(model, optimizer=optimizer, update="in_forward", compile_update=compile_update)
    updates, gate = session_of_first_step(step, optimizer), threading.Event()
    update = updates._update
    for name, change in HELD_WRITES.items():
        gate.clear()
        updates._update = lambda *arguments: (gate.wait(20), update(*arguments))
        train(step, optimizer)
        change(model)
        gate.set()
        with pytest.raises(L2LError, match="while its update was still to come"):
            train(step, optimizer), l2l_compile.synchronize(step)
            pytest.fail(name)
        updates._update = update
        train(step, optimizer)
        l2l_compile.synchronize(step)
        change(model)
        train(step, optimizer)
        l2l_compile.synchronize(step)


def session_of_first_step(step, optimizer):
    train(step, optimizer)
    return session_of(step).server.updates


def train(step, optimizer):
    step(rows(4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def give_other_data(model):
    for p in model.parameters():
        p.data = p.data.clone()


def write(model):
    with torch.no_grad():
        model.layers[0].up.weight[0, 0] = 1.0


def clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


WRITES = {
    "clamp": clamp_data,
    "other data": give_other_data,
    "of a vector": lambda model: vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters()),
    "another dtype and back": lambda model: model.to(torch.float32).to(torch.float64),
    "recorded": write,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_waits_for_the_update(name):
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    step = compiled(model, optimizer=optimizers[1], update="in_forward", compile_update=False)
    for _ in range(2):
        torch.manual_seed(0), train(plain, optimizers[0]), WRITES[name](plain)
        torch.manual_seed(0), train(step, optimizers[1]), WRITES[name](model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_groups_are_added_behind_the_updates(update):
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    steps = []
    for module, streamed in ((plain, False), (model, True)):
        optimizer = torch.optim.SGD(module.layers.parameters(), lr=0.1, momentum=0.9)
        step = compiled(module, optimizer=optimizer, update=update, compile_update=False) if streamed else module
        steps.append((module, optimizer, step))
    for number in range(4):
        x = rows(4)
        for module, optimizer, step in steps:
            step(x).pow(2).mean().backward()
            if number < 2:
                module.head.zero_grad()
            optimizer.step()
            if number == 1:
                optimizer.add_param_group({"params": module.head.parameters(), "lr": 0.05})
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
