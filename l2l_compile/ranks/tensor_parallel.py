"""Two operations of tensor parallel layers: a sum over ranks whose gradient is not summed, and the other way round.

They are the operators g and f of Megatron-LM (arXiv 1909.08053, section 3). Both run on the lane `compute`, inside of blocks:

    sum_over_ranks(part, group)  -> the sum, in memory of its own

On the host, PyTorch's own `_c10d_functional.all_reduce` cannot be left before the timeout of its group. This operator is polled, so a
rank that has failed releases those that wait for it.
"""

from __future__ import annotations

from typing import Any

import torch

from . import collectives as exchange
from .ranks import sums_of

_LIBRARY = torch.library.Library("l2l_compile", "FRAGMENT")
_LIBRARY.define("sum_over_ranks(Tensor part, str group) -> Tensor")
_sum = torch.ops.l2l_compile.sum_over_ranks


def _sum_over_ranks(part: torch.Tensor, group: str) -> torch.Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    exchange.all_reduce(total, *sums_of(exchange.group_named(group)))
    return total


def _sizes(part: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


_LIBRARY.impl("sum_over_ranks", _sum_over_ranks, "CompositeExplicitAutograd")
torch.library.register_fake("l2l_compile::sum_over_ranks", _sizes, lib=_LIBRARY)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: str) -> torch.Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


def sum_over(part: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks of a process group, by its name; each rank's part has the gradient of the sum."""
    return _SumOver.apply(part, group)


def sum_gradients(same: torch.Tensor, group: str) -> torch.Tensor:
    """A value that is the same on all ranks, and of which each computes another part: its gradient is the sum of theirs."""
    return _SumGradients.apply(same, group)
