"""The loss of a training step: the model's own, or one made from its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_compile.testing.leaves import leaves_of


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's loss if it returns one, else a fixed random projection of its outputs.

    A loss is the attribute or entry `loss`, a single number, or a number in the first place of a tuple.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [t for t in leaves_of(outputs).values() if isinstance(t, torch.Tensor)]
    if tensors and tensors[0].dim() == 0 and tensors[0].requires_grad:
        return tensors[0]
    return projection([t for t in tensors if t.requires_grad])


def projection(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of all entries times fixed random factors, divided by the root of their number. Every gradient depends on every entry."""
    total = torch.zeros(())
    for number, tensor in enumerate(tensors):
        factors = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        total = total + (tensor * factors.to(tensor.dtype)).sum() / max(tensor.numel(), 1) ** 0.5
    return total
