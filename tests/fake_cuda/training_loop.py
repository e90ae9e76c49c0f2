"""A small transformer and its training loop, for tests that count calls of CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

UPDATES = {
    "at_step": {"update": "at_step"},
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward", "max_grad_norm": 1.0},
    "delayed": {"update": "in_forward", "delay": 1},
}


class Layer(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64, vocabulary: int = 512):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def training(
    update: str, *, layers: int = 4, width: int = 64, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: object
) -> tuple[Callable, Callable[[], torch.Tensor]]:
    """A compiled model on the GPU, and a function that makes one step and returns the loss."""
    plain = Transformer(layers, width)
    optimizer = kind(plain.parameters(), lr=1e-3)
    given = {"micro_batches": 4, "device": "cuda", "block_compiler": "eager", **UPDATES[update], **options}
    if update != "at_step":
        given["optimizer"] = optimizer
    model = torch.compile(plain, backend="l2l", fullgraph=True, options=given)
    tokens = torch.randint(0, 512, (8, 32))

    def step() -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step
