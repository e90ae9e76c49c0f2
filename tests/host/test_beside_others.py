"""An optimizer whose step is not the compiled model's alone: hooks of the user, parameters outside of it, other compiled models."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from models import Stack, compiled, rows

MODES = ("in_forward", "in_backward")


class Parts(nn.Module):
    """Two parts that are compiled one by one, or one of them alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Stack(2), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.second(self.first(x))


def pair(make, options, parts=(), momentum=0.9):
    """A plain model and a streamed one, each with its optimizer; `parts` are compiled in the streamed one, or it is as a whole."""
    plain = make().double()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (plain, model)]
    chosen = {"optimizer": optimizers[1], "compile_update": False, **options}
    streamed = model
    for name in parts:
        setattr(model, name, compiled(getattr(model, name), **chosen))
    if not parts:
        streamed = compiled(model, **chosen)
    return (plain, optimizers[0]), (streamed, optimizers[1])


def train(module, optimizer, x, loss=lambda module, x: module(x).pow(2).mean()):
    loss(module, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(one, other):
    for module in other.modules():
        if hasattr(module, "_orig_mod"):
            l2l_compile.synchronize(module)
    for ours, theirs in zip(other.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", MODES)
def test_hooks_of_the_user_change_the_learning_rate(update):
    both = pair(lambda: Stack(2), {"update": update})

    def halve(optimizer, *_):
        optimizer.param_groups[0]["lr"] *= 0.5

    def raise_it(optimizer, *_):
        optimizer.param_groups[0]["lr"] += 0.03

    for _, optimizer in both:
        optimizer.register_step_post_hook(halve)
    for number in range(4):
        if number == 2 and update == "in_forward":  # before the updates of in_backward, nobody calls a step
            for _, optimizer in both:
                optimizer.register_step_pre_hook(raise_it)
        x = rows(4)
        for module, optimizer in both:
            train(module, optimizer, x)
    assert both[0][1].param_groups[0]["lr"] == pytest.approx(both[1][1].param_groups[0]["lr"], rel=1e-15)
    assert_same(both[0][0], both[1][0])


def test_a_step_with_gradients_from_outside_alone_is_clipped():
    both = pair(Parts, {"update": "in_forward", "max_grad_norm": 0.01}, parts=["first"])
    for outside_alone in (False, True, True, False):
        x = rows(4) if not outside_alone else torch.randn(4, 3, dtype=torch.float64)
        for module, optimizer in both:
            (module.second(x) if outside_alone else module(x)).pow(2).mean().backward()
            if optimizer is both[0][1]:
                nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(both[0][0], both[1][0])


@pytest.mark.parametrize("update", MODES)
def test_two_parts_of_one_optimizer(update):
    both = pair(Parts, {"update": update}, parts=["first", "second"])
    for _ in range(3):
        x = rows(4)
        for module, optimizer in both:
            train(module, optimizer, x)
    assert_same(both[0][0], both[1][0])


class Twins(nn.Module):
    """Two models of one class: Dynamo gives both the same program."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Stack(2), Stack(2)


def _backward(twins, order):
    """Backward of the twins, one after another: "ab" is the first, then the second."""
    for name in order:
        {"a": twins.first, "b": twins.second}[name](rows(4)).pow(2).mean().backward()


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize(("order", "accumulate"), [("ab", 1), ("aabb", 2), ("abab", 4)])
def test_twins_with_one_optimizer_take_steps_of_eager(update, order, accumulate):
    both = pair(Twins, {"update": update, "accumulate": accumulate}, parts=["first", "second"])
    for number in range(3):
        for module, optimizer in both:
            torch.manual_seed(number)
            _backward(module, order)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(both[0][0], both[1][0])


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize(("order", "calls"), [("aba", 3), ("abb", 3)])
def test_a_twin_with_too_many_backward_calls_is_refused(update, order, calls):
    _, (twins, _) = pair(Twins, {"update": update}, parts=["first", "second"])
    with pytest.raises(L2LError, match=f"{calls} backward calls without optimizer.step"):
        _backward(twins, order)


@pytest.mark.parametrize("update", MODES)
def test_a_twin_whose_last_round_is_missing_is_refused(update):
    _, (twins, optimizer) = pair(Twins, {"update": update, "accumulate": 2}, parts=["first", "second"])
    _backward(twins, "aab")
    with pytest.raises(L2LError, match="after 3 backward calls, but the option accumulate is 2"):
        optimizer.step()


def test_a_step_that_updated_one_twin_cannot_be_left_out():
    last = {"a": True, "b": False}
    names = iter("ab")
    options = {"update": "in_backward", "accumulate": lambda: last[next(names)]}
    _, (twins, optimizer) = pair(Twins, options, parts=["first", "second"])
    _backward(twins, "ab")
    with pytest.raises(L2LError, match="has made its updates already"):
        optimizer.zero_grad()


def test_two_parts_are_not_clipped_by_a_norm_of_each():
    _, (module, optimizer) = pair(Parts, {"update": "in_forward", "max_grad_norm": 1.0}, parts=["first", "second"])
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(L2LError, match="two compiled models are to be clipped by one norm"):
        train(module, optimizer, rows(4))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("update", MODES)
def test_two_compiled_models_of_the_same_parameters_are_refused(update):
    model = Stack(2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = compiled(model, optimizer=optimizer, update=update, compile_update=False)
    layers = compiled(model.layers[0], optimizer=optimizer, update=update, compile_update=False)
    loss = whole(rows(4)).pow(2).mean() + layers(torch.randn(4, 8, dtype=torch.float64)).pow(2).mean()
    with pytest.raises(L2LError, match="two compiled models train 6 of the same"):
        loss.backward()
        optimizer.step()


def test_another_model_of_the_same_weights_waits_for_updates():
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.05)
            return super().step(closure)

    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizers = [Slow(m.parameters(), lr=0.1) for m in (plain, model)]
    streamed, evaluated = compiled(model, optimizer=optimizers[1], update="in_forward", compile_update=False), compiled(model)
    x = rows(4)
    for _ in range(2):
        for module, optimizer in zip((plain, streamed), optimizers, strict=True):
            train(module, optimizer, x)
        with torch.no_grad():
            torch.testing.assert_close(evaluated(x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", MODES)
def test_a_scaler_of_gradients_is_refused(update):
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.first = compiled(model.first, optimizer=optimizer, update=update, compile_update=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(rows(4).float()).pow(2).mean()).backward()
    with pytest.raises(L2LError, match=r"torch.amp.GradScaler around update=.* leave it out"):
        scaler.step(optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    if update == "in_forward":
        optimizer.zero_grad()
        disabled.scale(model(rows(4).float()).pow(2).mean()).backward()
        disabled.step(optimizer)


class Tokens(nn.Module):
    """A table with sparse gradients, outside of the part that is compiled."""

    def __init__(self):
        super().__init__()
        self.table, self.rest = nn.Embedding(10, 5, sparse=True), Stack(2)

    def forward(self, tokens):
        return self.rest(self.table(tokens))


def test_a_sparse_gradient_from_outside():
    both = pair(Tokens, {"update": "in_forward"}, parts=["rest"], momentum=0.0)
    for _ in range(3):
        tokens = torch.randint(0, 10, (6,))
        for module, optimizer in both:
            train(module, optimizer, tokens)
    assert_same(both[0][0], both[1][0])
