"""Norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

PIECE = 1 << 20  # entries: a piece in float32 stays in a cache


def norm_of(gradient: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm of all entries, finite if they are.

    It is taken in `dtype`, by default in float32 at least, and in float64 where squares overflow float32: entries or norms of
    1.8e19 and more.
    """
    norm = _in_pieces(gradient, dtype or torch.promote_types(gradient.dtype, torch.float32))
    if not torch.isfinite(norm):
        norm = _in_pieces(gradient, torch.float64)
    if torch.isfinite(norm):
        return norm
    largest = torch.linalg.vector_norm(gradient.double(), float("inf"))
    return largest * torch.linalg.vector_norm(gradient / largest) if torch.isfinite(largest) else norm


def _in_pieces(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm from norms of pieces. Small gradients are one piece, whose norm has the bits of `clip_grad_norm_`.

    On a CPU, `vector_norm` adds up all squares in eight sums in float32, and each stops to grow at 2**24 times its summands. It is
    slow for entries in 16 bits, which are widened here piece by piece, in a buffer that stays in the cache.
    """
    pieces = gradient.reshape(-1).split(PIECE)
    wide = (
        dtype if len(pieces) == 1 else torch.promote_types(dtype, torch.float32)
    )  # the norms of pieces are not rounded to 16 bits
    buffer = None if gradient.dtype == wide else torch.empty(pieces[0].numel(), dtype=wide, device=gradient.device)
    norms = [torch.linalg.vector_norm(p if buffer is None else buffer[: p.numel()].copy_(p)) for p in pieces]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)).to(dtype)


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
