"""Norms of gradients, which a device takes before they cross the link, or the host."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host import server
from l2l_compile.host.updates import norms
from l2l_compile.host.updates.norms import norm_of, total_norm
from models import WIDTH, Shared, Stack, compiled, rows

MODELS = {
    "stack": lambda: Stack(3),
    "shared weights": lambda: nn.Sequential(Shared(), nn.Linear(WIDTH, 5)),
}


OVERLAPPED = ("in_backward", "in_forward")


def overlapped_step(model, update="in_backward", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compiled(model, optimizer=optimizer, update=update, compile_update=False, **options), optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("update", OVERLAPPED)
def test_the_norm_of_a_step(threaded, update, name, rounds, precision):
    """Gradients of shared weights and of several rounds add up before their norm is taken."""
    model = MODELS[name]().float()
    reference = copy.deepcopy(model)
    step, optimizer = overlapped_step(model, update, accumulate=rounds, precision=precision)
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


@pytest.mark.parametrize("update", OVERLAPPED)
def test_the_host_reads_no_gradient_with_a_norm_of_the_device(threaded, monkeypatch, update):
    read = []
    monkeypatch.setattr(norms, "_in_pieces", lambda gradient, dtype: read.append(gradient.shape) or torch.tensor(1.0))
    step, optimizer = overlapped_step(Stack(3).float(), update)
    for _ in range(2):
        step(rows(6, dtype=torch.float32)).sum().backward()
        optimizer.step()
    l2l_compile.synchronize(step)
    assert not read


def test_a_gradient_that_is_not_finite_changes_no_parameter(threaded):
    model = Stack(3).float()
    step, optimizer = overlapped_step(model)
    step(rows(6, dtype=torch.float32)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(L2LError, match="a gradient is not finite"):
        (step(rows(6, dtype=torch.float32)).sum() * float("inf")).backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e20), (torch.float32, 1e37), (torch.float64, 1e140)])
def test_a_large_norm_of_finite_gradients_is_finite(threaded, update, dtype, size):
    """The squares of such gradients overflow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / size)
    step = compiled(model, optimizer=optimizer, update=update, compile_update=False)
    x = torch.ones(2, 4, dtype=dtype)
    gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    expected = get_total_norm([g.double() for g in gradients]) * size
    before = copy.deepcopy(model.state_dict())
    (step(x).sum() * size).backward()
    optimizer.step()
    l2l_compile.synchronize(step)
    stats = l2l_compile.stats(step)
    assert stats.gradient_norm == pytest.approx(float(expected), rel=1e-5) and not stats.skipped_steps
    for (name, value), gradient in zip(before.items(), gradients, strict=True):
        torch.testing.assert_close(model.state_dict()[name], value - 0.1 * gradient)


def test_a_large_norm_is_clipped():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = compiled(model, optimizer=optimizer, update="in_forward", max_grad_norm=1.0, compile_update=False)
    before = copy.deepcopy(list(model.parameters()))
    (step(torch.ones(2, 4)).sum() * 1e25).backward()
    optimizer.step()
    changes = [now - then for now, then in zip(model.parameters(), before, strict=True)]
    assert float(get_total_norm(changes)) == pytest.approx(1.0, rel=1e-5)


def test_norms_up_to_the_largest_number():
    for gradient in (torch.full((4,), 3e38), torch.full((4,), 8e307, dtype=torch.float64), torch.full((4,), 3e38).bfloat16()):
        assert float(norm_of(gradient)) == pytest.approx(2 * float(gradient[0]), rel=1e-12)
    assert norm_of(torch.tensor([1.0, float("inf")])).isinf() and norm_of(torch.tensor([1.0, float("nan")])).isnan()
    ordinary = torch.randn(1000)
    assert torch.equal(norm_of(ordinary), torch.linalg.vector_norm(ordinary))
    assert float(total_norm([torch.tensor(1.5e19)] * 4)) == pytest.approx(3e19, rel=1e-6)
    assert torch.equal(total_norm([ordinary[0].abs()]), get_total_norm([ordinary[0].abs()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_large_gradient_is_not_rounded_off(dtype):
    """PyTorch's own norm of 150 million ones on a CPU is 0.95 of the right one."""
    ones = torch.ones(1, dtype=dtype).expand(150_000_000)
    assert float(norm_of(ones)) == pytest.approx(math.sqrt(150e6), rel=1e-6)


def test_norms_of_pieces_are_not_rounded_to_16_bits():
    ones = torch.ones(1, dtype=torch.bfloat16).expand(3_000_001)
    assert norm_of(ones, torch.bfloat16) == torch.tensor(math.sqrt(3_000_001)).bfloat16()


def test_a_norm_of_the_device_is_scaled_as_its_gradient():
    """A loss that comes late scales gradients on the host."""
    taken = [torch.tensor([1.0, 3.0], dtype=torch.float64)]
    assert server._by_weight(["first", "second"], taken, 0.5) == {"first": 0.5, "second": 1.5}
    assert server._by_weight(["first"], [], 0.5) == {}
