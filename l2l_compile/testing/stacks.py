"""Models of random layers, for property tests. A plan describes a model as a printable value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

INPUTS, TOKENS, OUTPUTS = 5, 3, 3


@dataclass(frozen=True)
class LayerPlan:
    """The parts of a layer.

    mixer       "mlp", "gated" or "attention"
    norm        "layer", "rms" or "none"
    activation  a function of `torch.nn.functional`
    """

    mixer: str
    norm: str
    residual: bool
    activation: str
    bias: bool


@dataclass(frozen=True)
class StackPlan:
    """The parts of a stack.

    layers  one plan for each layer
    order   indices of layers, in the order in which they run; a layer that comes twice is shared
    frozen  indices of layers without gradients; -1 is the embedding
    outputs names of the outputs: "logits", "loss", "states", "best", "detached"
    seed    the seed of the weights
    """

    layers: tuple[LayerPlan, ...]
    order: tuple[int, ...]
    width: int
    outputs: tuple[str, ...]
    frozen: frozenset[int]
    seed: int


class Attention(nn.Module):
    """Self-attention of two heads."""

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda _: nn.Identity()}


class Layer(nn.Module):
    def __init__(self, plan: LayerPlan, width: int):
        super().__init__()
        self.plan = plan
        self.norm = NORMS[plan.norm](width)
        if plan.mixer == "attention":
            self.mix = Attention(width)
        else:
            self.up, self.down = nn.Linear(width, 2 * width, plan.bias), nn.Linear(2 * width, width, plan.bias)
            self.gate = nn.Linear(width, 2 * width, plan.bias) if plan.mixer == "gated" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.plan.mixer == "attention":
            y = self.mix(y)
        else:
            h = getattr(F, self.plan.activation)(self.up(y))
            y = self.down(h * self.gate(y) if self.gate is not None else h)
        return x + y if self.plan.residual else torch.tanh(y)


class Stack(nn.Module):
    """Embedding, layers and head of a plan; takes [rows, TOKENS, INPUTS] and returns a dict."""

    def __init__(self, plan: StackPlan):
        super().__init__()
        self.plan = plan
        with torch.random.fork_rng([]):
            torch.manual_seed(plan.seed)
            self.embed, self.head = nn.Linear(INPUTS, plan.width), nn.Linear(plan.width, OUTPUTS)
            self.layers = nn.ModuleList([Layer(layer, plan.width) for layer in plan.layers])
        for index in plan.frozen:
            (self.embed if index < 0 else self.layers[index]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        x, states = self.embed(x), []
        for index in self.plan.order:
            x = self.layers[index](x)
            states.append(x)
        found = {
            "logits": self.head(x),
            "loss": self.head(x).pow(2).mean(),
            "states": tuple(states),
            "best": x.argmax(-1),
            "detached": x.detach() * 2,
        }
        return {name: found[name] for name in self.plan.outputs}

    def example(self, rows: int = 9) -> torch.Tensor:
        """A batch, [rows, TOKENS, INPUTS]: the same in every call."""
        return torch.randn(rows, TOKENS, INPUTS, generator=torch.Generator().manual_seed(self.plan.seed))

    def __repr__(self) -> str:
        return repr(self.plan)
