"""Backwards whose gradients are not for the optimizer: `torch.autograd.grad(loss, x)`, `backward(inputs=[x])`."""

from __future__ import annotations

import copy
import time

import pytest
import torch

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.server import ParameterServer
from models import Stack, compiled, rows


def adversarial(step, optimizer, x, again):
    """A step on inputs that are moved along their gradient (FGSM)."""
    x = x.clone().requires_grad_()
    loss = step(x).pow(2).mean()
    if again == "grad":
        (gradient,) = torch.autograd.grad(loss, x)
    elif again == "inputs":
        loss.backward(inputs=[x])
        gradient = x.grad
    else:
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    if again != "graph kept":
        step((x + 0.1 * gradient.sign()).detach()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return gradient.detach().clone()


@pytest.mark.parametrize("again", ["grad", "inputs", "graph kept"])
@pytest.mark.parametrize(
    "options", [{"update": "in_forward"}, {"update": "in_backward"}, {"update": "in_forward", "precision": "bf16"}], ids=str
)
def test_the_optimizer_does_not_see_them(options, again):
    dtype = torch.float32 if "precision" in options else torch.float64
    plain = Stack(2).to(dtype)
    model = copy.deepcopy(plain)
    optimizer, streamed = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model))
    step = compiled(model, optimizer=streamed, compile_update=False, **options)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-2
    for _ in range(3):
        x = rows(4, dtype=dtype)
        expected, found = adversarial(plain, optimizer, x, again), adversarial(step, streamed, x, again)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    l2l_compile.synchronize(step)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert ours.grad is None


def test_those_of_the_backward_before_are_still_on_their_way(monkeypatch):
    """The host lane is slow to collect what `loss.backward()` has pushed; the graph is kept for a gradient of the input."""
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizer, streamed = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    step = compiled(model, optimizer=streamed, update="in_forward", compile_update=False)
    collect = ParameterServer._collect
    monkeypatch.setattr(ParameterServer, "_collect", lambda *arguments: (time.sleep(0.05), collect(*arguments)))
    for module, own in ((plain, optimizer), (step, streamed)):
        torch.manual_seed(0)
        x = rows(4).requires_grad_()
        loss = module(x).pow(2).mean()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, x)
        own.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_gradients_of_parameters_are_refused_with_a_remedy(update):
    model = Stack(2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, parameters = compiled(model, optimizer=optimizer, update=update, compile_update=False), list(model.parameters())
    for take in (
        lambda loss: torch.autograd.grad(loss, parameters),
        lambda loss: loss.backward(inputs=parameters[:2]),
    ):
        before = [p.detach().clone() for p in parameters]
        with pytest.raises(L2LError, match=r"the option optimizer has all gradients .* Use update='at_step'"):
            take(step(rows(4)).pow(2).mean())
        assert all(map(torch.equal, before, parameters))
    step(rows(4)).pow(2).mean().backward()
    optimizer.step()
