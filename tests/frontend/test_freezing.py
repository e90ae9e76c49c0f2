"""Parameters that are frozen and unfrozen between calls."""

from __future__ import annotations

import copy

import torch

from l2l_compile import L2LError
from models import Stack, compiled, rows


def test_gradients_follow_requires_grad_or_there_is_an_error():
    plain = Stack(3).double()
    model = copy.deepcopy(plain)
    step = compiled(model)
    for frozen in (("head", "layers.0"), ("layers.0",), (), ("embed",)):
        x = rows(4)
        for module in (plain, model):
            for name, p in module.named_parameters():
                p.requires_grad_(not name.startswith(tuple(frozen)))
                p.grad = None
        plain(x).pow(2).mean().backward()
        try:
            step(x).pow(2).mean().backward()
        except L2LError as error:  # PyTorch 2.11 compiles nothing again
            assert "Call torch._dynamo.reset() after you unfreeze parameters" in str(error)
            torch._dynamo.reset()
            step(x).pow(2).mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
