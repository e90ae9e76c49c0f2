"""`update="in_backward"` on a device that takes the norms of gradients before they cross the link."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.optimizer import in_backward
from models import WIDTH, Shared, Stack, compiled, rows

MODELS = {
    "stack": lambda: Stack(3),
    "shared weights": lambda: nn.Sequential(Shared(), nn.Linear(WIDTH, 5)),
}


def in_backward_step(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compiled(model, optimizer=optimizer, update="in_backward", compile_update=False, **options), optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_norm_of_a_step(threaded, name, rounds, precision):
    """Gradients of shared weights and of several rounds add up before their norm is taken."""
    model = MODELS[name]().float()
    reference = copy.deepcopy(model)
    step, optimizer = in_backward_step(model, accumulate=rounds, precision=precision)
    for _ in range(2):
        reference.load_state_dict(model.state_dict())
        reference.zero_grad()
        for number in range(rounds):
            x = rows(6, dtype=torch.float32) + number
            step(x).pow(2).mean().backward()
            reference(x).pow(2).mean().backward()
        optimizer.step()
        expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
        assert l2l_compile.stats(step).gradient_norm == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.02)


def test_the_host_reads_no_gradient_whose_norm_the_device_has_taken(threaded, monkeypatch):
    read = []
    squares = in_backward.sum_of_squares
    monkeypatch.setattr(in_backward, "sum_of_squares", lambda gradients: squares(read.append(g.shape) or g for g in gradients))
    step, optimizer = in_backward_step(Stack(3).float())
    for _ in range(2):
        step(rows(6, dtype=torch.float32)).sum().backward()
        optimizer.step()
    assert not read


def test_a_gradient_that_is_not_finite_changes_no_parameter(threaded):
    model = Stack(3).float()
    step, optimizer = in_backward_step(model)
    step(rows(6, dtype=torch.float32)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(L2LError, match="a gradient is not finite"):
        (step(rows(6, dtype=torch.float32)).sum() * float("inf")).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
