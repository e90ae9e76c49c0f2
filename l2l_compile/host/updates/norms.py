"""Norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of all entries, finite if they are.

    It is taken in float32 at least, and in float64 where squares overflow float32: entries or norms of 1.8e19 and more.
    """
    norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    if not torch.isfinite(norm):
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    if torch.isfinite(norm):
        return norm
    largest = torch.linalg.vector_norm(gradient.double(), float("inf"))
    return largest * torch.linalg.vector_norm(gradient / largest) if torch.isfinite(largest) else norm


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """The sum of the squares of all entries."""
    return sum(float(norm_of(g).double() ** 2) for g in gradients)


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, from the norm of each. Finite if these are."""
    if all(n.dtype == norms[0].dtype for n in norms):
        total = torch.nn.utils.get_total_norm(norms)  # with the bits of `clip_grad_norm_`
        if torch.isfinite(total):
            return total
    return norm_of(torch.stack([n.double() for n in norms]))
