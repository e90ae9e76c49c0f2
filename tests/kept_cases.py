"""Models that keep what they compute inside of layers, and steps of them with and without it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import (
    WIDTH,
    BiasOfFirst,
    Broken,
    EncoderDecoder,
    Funnel,
    Layer,
    Shared,
    Stack,
    TwoHeads,
    UNet,
    compiled,
    loss_of,
    rows,
)

MUCH = "1MB"


class Convolutions(nn.Module):
    """Layers whose memory is not in the order of their dimensions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x.to(memory_format=torch.channels_last)))
        return x


class Written(nn.Module):
    """Layers that write into their values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).mul_(2.0).relu_()
        return x


class Normalised(nn.Module):
    """A layer that writes into its buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = Layer(), nn.BatchNorm1d(WIDTH), Layer()

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Routed(nn.Module):
    """Three outputs, whose gradients reach different segments."""

    def __init__(self):
        super().__init__()
        self.layers, self.router = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x):
        early = self.layers[0](x)
        return {
            "aux": self.router(early).logsumexp(-1).pow(2).mean(),
            "early": early,
            "late": self.layers[2](self.layers[1](early)),
        }


WIDE = (4, WIDTH)
MODELS = {
    "stack": (lambda: Stack(3, dropout=0.3), (5,)),
    "encoder and decoder": (lambda: EncoderDecoder(2), WIDE),
    "bias": (BiasOfFirst, WIDE),
    "shared": (Shared, (5,)),
    "u-net": (UNet, (WIDTH,)),
    "funnel": (Funnel, (5,)),
    "two heads": (TwoHeads, (5,)),
    "graph break": (Broken, (5,)),
    "convolutions": (Convolutions, (3, 6, 6)),
    "writes": (Written, (WIDTH,)),
    "batch norm": (Normalised, (WIDTH,)),
}
UPDATES = {"at_step": {}, "in_backward": {"update": "in_backward"}, "in_forward": {"update": "in_forward"},
           "delay": {"update": "in_forward", "delay": 1}}  # fmt: skip


def trained(name, keep, count=7, dtype=torch.float64, steps=3, **options):
    """The losses and the parameters of some steps, and the compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "update" in options or options.get("precision") == "fp16":
        options["optimizer"] = optimizer
    step, losses = compiled(model, keep=keep, **options), []
    for number in range(steps):
        loss = loss_of(step(rows(count + number % 2, *shape, dtype=dtype)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    l2l_compile.synchronize(step)
    return [*losses, *(p.detach().clone() for p in model.parameters()), *model.buffers()], step


def assert_equal_gradients(model, twin):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)


def assert_equal_bits(name, keep=MUCH, keep_on_host=0, **options):
    """Equal bits with and without what is kept. Returns the model that keeps."""
    expected, _ = trained(name, 0, **options)
    found, step = trained(name, keep, keep_on_host=keep_on_host, **options)
    assert all(map(torch.equal, found, expected))
    return step
