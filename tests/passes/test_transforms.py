"""Transforms of torch.func inside of a model: a gradient that mixes the rows of the batch keeps it together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

import l2l_compile
from models import pair_of, rows


class Gradient(nn.Module):
    """A head behind a gradient of `objective`, taken with respect to rows of the batch."""

    def __init__(self, objective):
        super().__init__()
        self.inner, self.head, self.objective = nn.Linear(8, 8), nn.Linear(8, 8), objective

    def forward(self, x):
        return self.head(x + self.objective(self.inner, x))


def adapted(net, x):
    """A step of MAML: the network after one step on the batch."""
    weights = dict(net.named_parameters())
    steps = grad(lambda w: F.mse_loss(functional_call(net, w, (x,)), x))(weights)
    return functional_call(net, {name: w - 0.5 * steps[name] for name, w in weights.items()}, (x,))


MIXING = {
    "a mean": lambda net, x: grad(lambda v: net(v).pow(2).mean())(x),
    "a loss": lambda net, x: grad(lambda v: F.mse_loss(net(v), torch.zeros_like(v)))(x),
    "a sum that is squared": lambda net, x: grad(lambda v: net(v).sum() ** 2)(x),
    "over the rows": lambda net, x: grad(lambda v: net(v).logsumexp(0).sum())(x),
    "a norm": lambda net, x: vjp(lambda v: net(v) / net(v).norm(), x)[1](x)[0],
    "a step of MAML": adapted,
}
ROW_WISE = {
    "a sum over the rows": lambda net, x: grad(lambda v: net(v).pow(2).sum())(x),
    "for each row": lambda net, x: vmap(grad(lambda v: net(v).pow(2).mean()))(x),
    "a Jacobian for each row": lambda net, x: vmap(jacrev(lambda v: net(v).tanh()))(x).sum(-1),
}


@pytest.mark.parametrize("objective", [*MIXING.values(), *ROW_WISE.values()], ids=[*MIXING, *ROW_WISE])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_outputs_and_gradients_are_eagers(objective, frozen):
    model = Gradient(objective)
    model.inner.requires_grad_(not frozen)
    pair_of(model.double(), micro_batches=3).step(rows(6, 8)).check()


@pytest.mark.parametrize("objective", MIXING.values(), ids=MIXING)
def test_nothing_trains_and_no_mode_is_set(objective):
    model = Gradient(objective).double().requires_grad_(False)
    x = rows(6, 8)
    streamed = torch.compile(model, backend="l2l", options={"micro_batches": 3, "block_compiler": "eager"})
    torch.testing.assert_close(streamed(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("objective", ROW_WISE.values(), ids=ROW_WISE)
def test_row_wise_gradients_run_in_the_inner_loop(objective):
    report = l2l_compile.explain(Gradient(objective).double(), {"micro_batches": 3})(rows(6, 8))
    assert not report.whole_batch
