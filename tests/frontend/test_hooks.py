"""Hooks of modules that come and go between calls: stock `torch.compile` leaves them out once a module was compiled without."""

from __future__ import annotations

import copy

import pytest
import torch

from models import Stack, compiled, rows

HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda module, inputs, output: 2 * output),
    "before forward": lambda module: module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
    "backward": lambda module: module.register_full_backward_hook(lambda module, grads, _: (3 * grads[0],)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_added_after_the_first_call_runs_until_removed(kind):
    plain = Stack(3).double()
    model = copy.deepcopy(plain)
    step, x = compiled(model), rows(6)
    for with_hook in (False, True, False):
        handles = [HOOKS[kind](m.layers[1]) for m in (plain, model)] if with_hook else []
        found = []
        for module in (plain, step):
            module.zero_grad()
            output = module(x)
            output.pow(2).mean().backward()
            found.append([output.detach(), *(p.grad for p in module.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
        for handle in handles:
            handle.remove()


def test_a_backward_hook_within_a_sequential_is_a_warning():
    """Dynamo leaves the whole of PyTorch's own container uncompiled."""
    plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    HOOKS["backward"](plain[1])
    step = torch.compile(plain, backend="l2l", options={"device": "cpu"})
    with pytest.warns(UserWarning, match=r"does not run nn.Sequential.forward.*hooks"):
        step(torch.randn(6, 4))
