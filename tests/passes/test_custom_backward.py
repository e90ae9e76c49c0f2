"""The backward of a torch.autograd.Function: rows that it mixes stay together, and so do gradients that are no sums over rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from models import assert_parity, pair_of, rows

# Dynamo makes an instance of the class
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def function(backward, forward=lambda x: x.clone()):
    """A function of one value, with this backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Function


class Linear(torch.autograd.Function):
    """A linear layer whose gradient of the weight is multiplied by `scale`."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, ctx.scale(g.t() @ x, x), None


class OnValues(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.last, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call

    def forward(self, x):
        return self.last(self.call.apply(self.first(x)))


class OnWeights(OnValues):
    def forward(self, x):
        return self.last(x @ self.call.apply(self.first.weight).t())


class AsLinear(OnValues):
    """`call` is the scale of the gradient."""

    def forward(self, x):
        return self.last(Linear.apply(x, self.first.weight, self.call))


MIXING = {
    "divided by the norm": OnValues(function(lambda g, x: g / g.norm())),
    "centred": OnValues(function(lambda g, x: g - g.mean(0))),
    "in another order": OnValues(function(lambda g, x: g.flip(0))),
    "divided by the number of rows": OnValues(function(lambda g, x: g / len(g))),
    "with a mean that was saved": OnValues(function(lambda g, x: g * x.mean(0))),
    "sign of the gradient of a weight": OnWeights(function(lambda g, w: g.sign())),
    "clamped gradient of a weight": OnWeights(function(lambda g, w: g.clamp(-0.1, 0.1))),
    "a constant for a weight": OnWeights(function(lambda g, w: torch.ones_like(w))),
    "a weight, by the number of rows": AsLinear(lambda gradient, x: gradient / len(x)),
    "a weight, by its norm": AsLinear(lambda gradient, x: gradient / gradient.norm()),
}
ROW_WISE = {
    "reversed": OnValues(function(lambda g, x: -g, lambda x: x.view_as(x))),
    "straight through": OnValues(function(lambda g, x: g * (x.abs() <= 1), torch.round)),
    "clamped": OnValues(function(lambda g, x: g.clamp(-0.1, 0.1))),
    "by the norm of each row": OnValues(function(lambda g, x: g / g.norm(dim=-1, keepdim=True))),
    "a quantized weight": OnWeights(function(lambda g, w: g * (w.abs() <= 1), lambda w: torch.round(w * 7) / 7)),
    "a linear layer": AsLinear(lambda gradient, x: 2 * gradient),
}


@pytest.mark.parametrize("model", [*MIXING.values(), *ROW_WISE.values()], ids=[*MIXING, *ROW_WISE])
def test_gradients_are_eagers(model):
    pair_of(model.double(), micro_batches=3).step(rows(6, 8)).check()


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
def test_the_report_names_the_backward(model):
    report = l2l_compile.explain(model.double(), {"micro_batches": 3})(rows(6, 8))
    assert [found for found in report.whole_batch if "in the backward of an autograd.Function" in found.reason]


@pytest.mark.parametrize("model", ROW_WISE.values(), ids=ROW_WISE)
def test_row_wise_ones_run_in_the_inner_loop(model):
    assert not l2l_compile.explain(model.double(), {"micro_batches": 3})(rows(6, 8)).whole_batch


def test_what_stands_before_and_behind_a_mixing_one_is_split():
    model = OnValues(function(lambda g, x: g / g.norm())).double()
    (found,) = l2l_compile.explain(model, {"micro_batches": 3})(rows(6, 8)).programs
    assert [segment.block.inner_looped for segment in found.segments] == [True, False, True]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.domain = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, strength):
        return self.domain(Reversed.apply(self.features(x), strength))


def test_a_number_that_changes_from_step_to_step():
    """Dynamo makes a tensor of it from the second value on, and reads it within the graphs of the function."""
    batches = [(rows(6, 8), strength) for strength in (0.1, 0.2, 0.3)]
    assert_parity(Adversarial().double(), *batches)
