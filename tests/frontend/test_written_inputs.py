"""Inputs of a graph that the model writes into where gradients flow: what reads them after the graph leads back into it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile import programs
from models import WIDTH, Stack, assert_parity, forward_alone, pair_of, rows

split_graph = torch._dynamo.graph_break


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Weighted(Parts):
    """Losses in a dictionary, weighted in place, as object detectors and segmentation models do."""

    def forward(self, x):
        losses = {"a": self.b(torch.tanh(self.a(x))).square().mean(), "b": self.c(x).square().mean()}
        split_graph()
        for loss in losses.values():
            loss *= 20.0
        split_graph()
        return sum(losses.values())


class Kept(Parts):
    """Read under another name after the write."""

    def forward(self, x):
        h = kept = self.a(x)
        split_graph()
        h.mul_(2.0).add_(self.b(x))
        split_graph()
        return self.c(kept)


class ThroughAView(Parts):
    def forward(self, x):
        h = self.a(x)
        split_graph()
        h[:, : WIDTH // 2].mul_(self.b(x)[:, : WIDTH // 2])
        split_graph()
        return self.c(h)


class Filled(Parts):
    """A tensor without a gradient has one once layers have written into it."""

    def forward(self, x):
        made = x.new_zeros(*x.shape, 2)
        split_graph()
        made[..., 0] = self.a(x)
        made[..., 1] = self.b(x)
        split_graph()
        return self.c(made.sum(-1))


class Several(Parts):
    """Two inputs, and other results of the same graph."""

    def forward(self, x):
        h, g = self.a(x), self.b(x)
        split_graph()
        h.mul_(2.0)
        g.add_(h)
        other = (h + g).sum()
        split_graph()
        return self.c(h * g) + other


class Returned(Parts):
    def forward(self, x):
        h = self.doubled(self.a(x))
        return self.c(h)

    def doubled(self, h):
        split_graph()
        h.mul_(self.b.weight.sum())
        return h


class WithoutRecording(Parts):
    """Written without a gradient, then with one: the gradient passes the first write as if it were not there."""

    def forward(self, x):
        h = self.a(x)
        split_graph()
        with torch.no_grad():
            h.mul_(0.5)
        h.mul_(self.b(x))
        split_graph()
        return self.c(h)


class Data(Parts):
    def forward(self, x):
        h = self.a(x)
        split_graph()
        h.data.clamp_(-0.2, 0.2)
        y = self.b(h)
        split_graph()
        return self.c(y) + h


class ALeaf(Parts):
    """A leaf can be written without recording alone, and gets the gradient of what it holds now."""

    def forward(self, x):
        x = (x * 1.0).detach().requires_grad_()
        split_graph()
        with torch.no_grad():
            x.mul_(0.5)
        y = self.a(x)
        split_graph()
        return self.c(self.b(y) + x)


class ByLayers(nn.Module):
    """Every layer of a stack adds to the stream in place."""

    def __init__(self):
        super().__init__()
        self.first, self.stack = nn.Linear(WIDTH, WIDTH), Stack(4)

    def forward(self, x):
        h = stream = self.first(x)
        split_graph()
        for layer in self.stack.layers:
            h += layer(h * 1.0)
        split_graph()
        return stream.sin()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "model",
    [Weighted, Kept, ThroughAView, Filled, Several, Returned, WithoutRecording, Data, ALeaf, ByLayers],
    ids=lambda model: model.__name__,
)
@pytest.mark.slow(but="*-3")
def test_gradients_are_eagers(model, micro_batches):
    step = assert_parity(model().double(), *([rows(6, 4, WIDTH)] * 2), micro_batches=micro_batches)
    assert len(programs(step)) > 1


def test_a_written_input_of_the_caller_carries_the_gradient():
    class Adding(nn.Linear):
        def forward(self, x, y):
            y.add_(super().forward(x))

    def step(call, x, y):
        call(x, y)
        y.square().mean().backward()

    found = pair_of(Adding(WIDTH, WIDTH).double()).run(step, rows(6, WIDTH), rows(6, WIDTH)).check()
    assert {str(d.key) for d in found.differences if d.norm} == {"input 1", "gradient of weight", "gradient of bias"}


def test_without_gradients_new_contents_are_written_all_the_same():
    with torch.no_grad():
        pair_of(Kept().double()).run(forward_alone, rows(6, WIDTH)).check()
