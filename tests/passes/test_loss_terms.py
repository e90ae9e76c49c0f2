"""Losses over rows: what each row contributes in the inner loop, the reduction once."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import Stack, assert_parity, compiled, rows

IGNORED = 2


class Classifier(nn.Module):
    """Scores of five classes for each of `count` places in a row; the loss is inside."""

    def __init__(self, places: tuple[int, ...], loss, depth=2):
        super().__init__()
        self.body, self.places, self.loss = Stack(depth), places, loss
        self.head = nn.Linear(8, 5 * torch.Size(places).numel())

    def forward(self, x, target):
        scores = self.head(self.body.layers[0](self.body.embed(x))).unflatten(1, (5, *self.places))
        return {"loss": self.loss(scores, target)}


def targets(count: int, *places: int) -> torch.Tensor:
    """Classes; the ignored one is all that is in the first two rows, and rare later."""
    found = torch.randint(5, (count, *places))
    found[:2] = IGNORED
    return found


@pytest.mark.parametrize(
    "reduction, weighted, smoothing, places, ignored",
    [
        *itertools.product(("mean", "sum"), (False, True), (0.0, 0.2), ((), (3,), (2, 2)), (IGNORED,)),
        ("mean", False, 0.0, (), -100),
        ("none", False, 0.1, (3,), IGNORED),
    ],
)
def test_cross_entropy(reduction, weighted, smoothing, places, ignored):
    weight = torch.rand(5).double() if weighted else None
    model = Classifier(
        places, lambda s, t: F.cross_entropy(s, t, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
    ).double()
    step = assert_parity(model, (rows(6), targets(6, *places)), (rows(5), targets(5, *places)))
    head = next(s for p in l2l_compile.programs(step) for s in p.segments if "head.weight" in s.parameter_names)
    assert head.micro_batches == 3


def test_a_loss_in_a_graph_without_parameters():
    class Broken(Classifier):
        def forward(self, x, target):
            scores = self.head(self.body.layers[0](self.body.embed(x))).unflatten(1, (3, 5))
            torch._dynamo.graph_break()
            return {"loss": F.cross_entropy(scores.view(-1, 5), target.view(-1))}

    assert_parity(Broken((3,), None).double(), (rows(6), targets(6, 3)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nll_loss(reduction):
    model = Classifier((), lambda s, t: F.nll_loss(F.log_softmax(s, 1), t, ignore_index=IGNORED, reduction=reduction)).double()
    assert_parity(model, (rows(6), targets(6)))


def test_a_loss_keeps_its_bits():
    """The reduction of fp32 terms is the one kernel that eager uses, in eager's order."""
    torch.manual_seed(0)
    model = Classifier((33,), lambda s, t: F.cross_entropy(s, t, ignore_index=IGNORED))
    x, target = rows(50, dtype=torch.float32), targets(50, 33)
    actual = compiled(model, micro_batches=7)(x, target)["loss"]
    assert actual.item() == model(x, target)["loss"].item()


def test_no_target_counts():
    """As in eager, a mean over nothing is no number, and the sum over nothing is zero."""
    model = Classifier(
        (),
        lambda s, t: torch.stack(
            [F.cross_entropy(s, t, ignore_index=IGNORED), F.cross_entropy(s, t, ignore_index=IGNORED, reduction="sum")]
        ),
    ).double()
    loss = compiled(model)(rows(6), torch.full((6,), IGNORED))["loss"]
    assert loss[0].isnan() and loss[1] == 0


def test_probabilities_as_targets():
    model = Classifier((), lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1)).double()
    assert_parity(model, (rows(6), rows(6, 5).softmax(1)))


def test_a_target_that_does_not_exist_is_an_error():
    model = Classifier((), F.cross_entropy).double()
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        compiled(model)(rows(6), torch.full((6,), 7))


LOSSES = {
    "mse": lambda y: F.mse_loss(y, y.detach().flip(1)),
    "mse sum": lambda y: F.mse_loss(y, y.detach().flip(1), reduction="sum"),
    "l1": lambda y: F.l1_loss(y, y.detach().flip(1)),
    "smooth l1": lambda y: F.smooth_l1_loss(y, y.detach().flip(1)),
    "huber": lambda y: F.huber_loss(y, y.detach().flip(1)),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, y.detach().sigmoid(), pos_weight=torch.tensor(2.0)),
    "bce of probabilities": lambda y: F.binary_cross_entropy(y.sigmoid(), y.detach().sigmoid().flip(1)),
    "kl": lambda y: F.kl_div(y.log_softmax(1), y.detach().softmax(1).flip(1), reduction="batchmean"),
    "kl mean": lambda y: F.kl_div(y.log_softmax(1), y.detach().log_softmax(1).flip(1), reduction="sum", log_target=True),
    "hinge": lambda y: F.multi_margin_loss(y, torch.ones(len(y), dtype=torch.long)),
    "mean": lambda y: y.pow(2).mean(),
    "masked mean": lambda y: (y * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "mean and sum": lambda y: y.mean() + 0.1 * y.pow(2).sum() / len(y),
    "norm": lambda y: y.norm(),
    "deviation": lambda y: y.std(0).sum(),
    "largest": lambda y: y.amax(0).sum(),
    "cosine": lambda y: F.cosine_embedding_loss(y, y.detach().flip(1), torch.ones(len(y))),
    "gaussian": lambda y: F.gaussian_nll_loss(y, y.detach().flip(1), torch.full_like(y, 0.5)),
    "margin": lambda y: F.margin_ranking_loss(y[:, 0], y[:, 1], torch.ones(len(y))),
    "soft margin": lambda y: F.soft_margin_loss(y, y.detach().sign()),
    "correlation": lambda y: ((y.t() @ y) / len(y) - torch.eye(y.shape[1])).pow(2).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_parts(name):
    """Micro-batches of unequal sizes; the second batch has other sizes than the first."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Stack(3)

        def forward(self, x):
            return {"loss": LOSSES[name](self.body(x))}

    step = assert_parity(Model().double(), rows(8), rows(5), micro_batches=3)
    head = next(s for p in l2l_compile.programs(step) for s in p.segments if "body.head.weight" in s.parameter_names)
    assert head.micro_batches == 3, head.block.reason
