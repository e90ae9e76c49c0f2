"""The three values of `update` on sharded parameters: each rank updates its shards, and all decide from the same numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from steps import OPTIONS, assert_same, whole
from test_mean import Odd, numbers, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.session import session_of
from models import Stack

STEPS = 3
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


def trained(rank, world, kind="stack", optimizer="adamw", **options):
    """A model after some steps in a way to update: its whole parameters, and what `stats` says of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch, loss = {
        "stack": (Stack(3).double(), numbers, lambda y: y.pow(2).mean()),
        "odd": (Odd().double(), lambda r, s: tokens(r, s, 11), lambda y: y),
    }[kind]
    if world > 1:
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, "optimizer": chosen, **options})
    seen = []
    for number in range(STEPS):
        loss(step(batch(rank, number))).backward()
        chosen.step()
        chosen.zero_grad()
        seen.append(l2l_compile.stats(step))
    l2l_compile.synchronize(step)
    return model, chosen, seen


def all_ways_are_bit_equal(rank, world, kind, optimizer):
    expected, their_optimizer, norms = trained(rank, world, kind, optimizer)
    theirs = whole(expected)
    for update in ("in_backward", "in_forward"):
        model, ours, seen = trained(rank, world, kind, optimizer, update=update, compile_update=False)
        for name, parameter in whole(model).items():
            assert torch.equal(parameter, theirs[name]), (update, name)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert ours.state[p].keys() == their_optimizer.state[q].keys()
            for key, value in ours.state[p].items():
                assert type(value) is type(their_optimizer.state[q][key]), key
        compiled, _, _ = trained(rank, world, kind, optimizer, update=update)
        assert_same(whole(compiled), theirs, 1e-6)
        assert all(abs(a.gradient_norm - b.gradient_norm) <= 1e-12 * b.gradient_norm for a, b in zip(seen, norms, strict=True))
    return [s.gradient_norm for s in norms]


@pytest.mark.parametrize("kind", ["stack", "odd"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow(but="sgd-odd")
def test_all_ways_to_update_are_bit_equal(ranks, kind, optimizer):
    first, *others = ranks.run(all_ways_are_bit_equal, kind, optimizer, world=3 if optimizer == "adamw" else 2)
    assert all(other == first for other in others) and all(norm > 0 for norm in first)


def clipped(rank, world, delay):
    """The same batch on every rank: the mean is that of one process."""
    options = {"update": "in_forward", "max_grad_norm": 0.02, "compile_update": False, "delay": delay}
    model, _, seen = trained(0, world, "stack", "sgd", **options)
    torch._dynamo.reset()
    alone, _, expected = trained(0, 1, "stack", "sgd", **options)
    for ours, theirs in zip(seen, expected, strict=True):
        assert abs(ours.gradient_norm - theirs.gradient_norm) <= 1e-12 * theirs.gradient_norm
    assert_same(whole(model), {n: p.detach() for n, p in alone.named_parameters()}, 1e-12)
    return [s.gradient_norm for s in seen]


@pytest.mark.parametrize("delay", [0, 1])
def test_clipping_takes_the_norm_of_all_shards(ranks, delay):
    first, second = ranks.run(clipped, delay)
    assert first == second


class Large(nn.Module):
    """Overflows in float16 where a rank's input is large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def skips_alike(rank, world, update):
    torch.manual_seed(0)
    model = Large()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {**OPTIONS, "precision": "fp16", "optimizer": optimizer, "update": update}
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    found = []
    for number in range(4):
        x = torch.randn(4, 8) * (1e3 if (rank, number) == (1, 1) else 0.1)  # one rank's gradients overflow in one step
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = l2l_compile.stats(step)
        found.append((stats.skipped_steps, stats.loss_scale))
    l2l_compile.synchronize(step)
    return found, {name: p.tolist() for name, p in whole(model).items()}


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(ranks, update):
    first, second = ranks.run(skips_alike, update)
    assert first == second
    skipped = [count for count, _ in first[0]]
    assert skipped[-1] > skipped[0] or skipped[1] > 0


class OfTheWhole(torch.optim.Optimizer):
    """A step in the direction of a gradient whose norm is 1."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


def an_optimizer_of_wholes_is_refused(rank, world):
    for make in (OfTheWhole, torch.optim.Adafactor):
        for update in ("in_backward", "in_forward"):
            torch._dynamo.reset()
            model = Stack(2)
            l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
            options = {**OPTIONS, "optimizer": make(model.parameters()), "update": update}
            step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
            with pytest.raises(l2l_compile.L2LError, match=f"{make.__name__} looks at a parameter as a whole.*update='at_step'"):
                step(numbers(rank, 0).float())


def test_an_optimizer_that_needs_whole_tensors_is_refused(ranks):
    ranks.run(an_optimizer_of_wholes_is_refused)


def frozen_behind_backward(rank, world, delayed):
    """As loops of GANs do: the first layer is frozen between backward and step, or behind the step, and thawed before the next one."""
    torch.manual_seed(0)
    model = Stack(2).double()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**OPTIONS, "optimizer": optimizer, "update": "in_forward", "max_grad_norm": 0.02, "compile_update": False}
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for number in range(2):
        step(numbers(rank, number)).pow(2).mean().backward()
        if delayed:
            updates, gate = session_of(step).server.updates, threading.Event()
            look = type(updates)._look_at.__get__(updates)
            updates._look_at = lambda *given, gate=gate, look=look: gate.wait(10) and look(*given)
            optimizer.step()
            model.requires_grad_(False)
            gate.set()
        else:
            model.requires_grad_(False)
            optimizer.step()
        l2l_compile.synchronize(step)
        model.requires_grad_(True)
    return l2l_compile.stats(step).gradient_norm, {name: p.tolist() for name, p in whole(model).items()}


@pytest.mark.parametrize("delayed", [False, True])
def test_ranks_decide_together_though_parameters_are_frozen(ranks, delayed):
    frozen = ranks.run(frozen_behind_backward, delayed)
    assert frozen[0] == frozen[1]


def other_learning_rates_are_an_error(rank, world, options):
    """As those of a scheduler that looks at the loss of its rank."""
    torch.manual_seed(0)
    model = l2l_compile.shard(Stack(2), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    given = {**options, "optimizer": optimizer} if options else {}
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **given})
    for number in range(2):
        step(torch.randn(4, 5)).mean().backward()
        if number:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
        optimizer.step()
        optimizer.zero_grad()
    expected = "had lr=0.1 in group 0 on rank 0 and lr=0.05 in group 0 on rank 1"
    with pytest.raises(
        L2LError, match=f"rank 0: begins forward 3, .* after 2 .*\n.*rank 1: .*\n  the last optimizer step {expected}"
    ):
        step(torch.randn(4, 5))


@pytest.mark.parametrize("options", [{}, {"update": "at_step"}, {"update": "in_forward"}], ids=["none", "at_step", "in_forward"])
def test_ranks_step_with_the_same_settings(ranks, options):
    ranks.run(other_learning_rates_are_an_error, options)
