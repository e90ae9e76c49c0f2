"""Small models that test one question each: kinds of attention, dropout, tensors made without a device or on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .zoo import LENGTH, ROWS, WIDTH

HEADS, LAYERS = 4, 3


class AttentionLayer(nn.Module):
    """Self-attention of `HEADS` heads by `scaled_dot_product_attention`; `kind` is causal, masked or grouped."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.groups = kind, 2 if kind == "grouped" else HEADS
        self.norm = nn.LayerNorm(WIDTH)
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, self.groups * size), nn.Linear(WIDTH, self.groups * size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            p(y).unflatten(-1, (n, -1)).transpose(1, 2)
            for p, n in ((self.q, HEADS), (self.k, self.groups), (self.v, self.groups))
        )
        found = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask if self.kind == "masked" else None,
            is_causal=self.kind == "causal",
            enable_gqa=self.kind == "grouped",
        )
        return x + self.o(found.transpose(1, 2).flatten(2))


class AttentionStack(nn.Module):
    """Layers of one kind of attention over `x` [rows, length, width]. If the kind is masked, rows end at `lengths`."""

    def __init__(self, kind: str):
        super().__init__()
        self.layers = nn.ModuleList(AttentionLayer(kind) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places < lengths[:, None])[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).pow(2).mean()


def sequences(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of an `AttentionStack`: x [7, 12, 64] and the length of each row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "lengths": torch.randint(3, LENGTH + 1, (ROWS,), generator=generator)}


class Masks(nn.Module):
    """h -> dropout(h * w) in each layer, so that the output is a product of all weights and masks.

    For w[j] of any layer, the gradient of sum(output) times w[j] equals the sum of column j of the output if, and only if,
    recompute uses the masks of forward. With `inside`, an attention kernel draws the masks.
    """

    def __init__(self, inside: bool, width: int = WIDTH):
        super().__init__()
        self.inside = inside
        self.weights = nn.ParameterList(nn.Parameter(1 + torch.rand(width)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        h = x
        for weight in self.weights:
            h = h * weight
            if self.inside:
                v = h.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                h = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5).transpose(1, 2).flatten(2)
            else:
                h = F.dropout(h, 0.5)
        return h


class Maker(nn.Module):
    """Layers that make a tensor themselves: `make(length)` gives a number for each place, on a device of its choice."""

    def __init__(self, make: Callable[[int], torch.Tensor]):
        super().__init__()
        self.make = make
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            made = self.make(x.shape[1])
            x = torch.tanh(layer(x)) + (made[:, None] * 0.1 if made.is_floating_point() else self.places(made))
        return x.pow(2).mean()


MAKERS: dict[str, Callable[[int], torch.Tensor]] = {
    "torch.arange without a device": lambda n: torch.arange(n),
    'device="cpu" in the model\'s code': lambda n: torch.arange(n, device="cpu"),
    "device=torch.device('cpu') in the model's code": lambda n: torch.arange(n, device=torch.device("cpu")),
    "a torch.tensor constant": lambda n: torch.tensor([0.5, -1.0, 2.0] * (LENGTH // 3)),
    "torch.ones without a device, sent to 'cpu'": lambda n: torch.ones(n).to("cpu"),
}
