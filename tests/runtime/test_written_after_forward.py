"""Writes between forward and backward that eager allows: the values that backward recomputes from are those that forward read."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from models import compiled, pair_of


class Scaled(nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.layer, self.copies = nn.Linear(4, 3), copies

    def forward(self, x):
        return self.layer(x.clone() if self.copies else x / 255)


class Queue(nn.Module):
    """MoCo's queue of keys: a number that is read from a tensor breaks the graph before the write."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.register_buffer("queue", torch.randn(12, 3))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = self.encoder(x)
        similar = keys @ self.queue.clone().detach().t()
        with torch.no_grad():
            at = int(self.at)
            self.queue[at : at + len(x)] = keys
            self.at[0] = (at + len(x)) % len(self.queue)
        return similar


def test_an_array_that_the_environment_writes_again():
    """PyTorch records no write into memory of NumPy."""
    model = Scaled(copies=False).double()
    found = []
    for call in (model, compiled(model)):
        array = numpy.full((6, 4), 100.0)
        loss = call(torch.from_numpy(array)).square().sum()
        array[:] = 200.0
        loss.backward()
        found.append(model.layer.weight.grad)
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=0)


def test_an_input_that_the_model_clones(threaded):
    pair = pair_of(Scaled(copies=True).double())
    held = torch.randn(6, 4, dtype=torch.float64)

    def step(call, x):
        first = call(x)
        saved = x.clone()
        x.mul_(2)
        first.square().sum().backward()
        x.copy_(saved)

    pair.run(step, held).check()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_queue_that_is_written_behind_a_graph_break(micro_batches):
    pair = pair_of(Queue().double(), micro_batches=micro_batches)
    for _ in range(4):
        pair.step(torch.randn(4, 4, dtype=torch.float64)).check()
