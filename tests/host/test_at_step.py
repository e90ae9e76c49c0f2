"""Training with updates at the step is training in eager mode on the same micro-batches, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from test_updates import OPTIMIZERS, data, frozen_in_the_middle
from torch import nn

import l2l_compile
from l2l_compile.ir.segments import micro_batch_sizes
from models import Stack, compiled


class Convolutions(nn.Module):
    """Layers whose gradients are not those of a matrix product."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.GroupNorm(1, 1), nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = self.first(x).unsqueeze(1)
        for layer in self.layers:
            x = x + layer(x)
        return x.squeeze(1)


MODELS = {"linear": Stack, "frozen": frozen_in_the_middle, "convolutions": Convolutions}


def train_eagerly(model, make_optimizer, steps, micro_batches):
    """Each micro-batch forward and backward; `backward` adds their gradients up in `p.grad`, in fp32."""
    optimizer = make_optimizer(model.parameters())
    for number in range(steps):
        whole = data(number)
        parts = whole.split(micro_batch_sizes(len(whole), micro_batches))
        outputs = [model(part) for part in parts]
        top = torch.cat([o.detach() for o in outputs]).requires_grad_()
        top.pow(2).mean().backward()
        for output, gradient in zip(outputs, top.grad.split([len(p) for p in parts]), strict=True):
            output.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.slow(but=("linear-*", "frozen-adamw", "convolutions-fused adamw"))
def test_bit_equal_to_eager_on_the_same_micro_batches(make, optimizer):
    model = MODELS[make]()
    reference = copy.deepcopy(model)
    expected = train_eagerly(reference, OPTIMIZERS[optimizer], 20, micro_batches=3)

    found = OPTIMIZERS[optimizer](model.parameters())
    step = compiled(model, micro_batches=3)
    for number in range(20):
        step(data(number)).pow(2).mean().backward()
        found.step()
        found.zero_grad()
    assert len(l2l_compile.programs(step)[0].segments) > 3
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert found.state[p].keys() == expected.state[q].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(expected.state[q][k])) for k, v in found.state[p].items()), (
            name
        )
