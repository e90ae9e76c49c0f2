"""Two operations of tensor parallel layers: one sums over ranks in forward only, the other sums gradients in backward only.

They are the operators g and f of Megatron-LM (arXiv 1909.08053, section 3). Both run on the lane `compute`, inside of blocks:

    sum_over_ranks(part, group)  -> the sum, in memory of its own

On the host, PyTorch's own `_c10d_functional.all_reduce` cannot be interrupted before the timeout of its group. This operator is
polled: if a rank fails, the ranks that wait for it stop waiting.
"""

from __future__ import annotations

from typing import Any

import torch

from l2l_compile.ranks import collectives as exchange
from l2l_compile.ranks.ranks import sums_of

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
    """The sum of `part` over the ranks of the process group named `group`. Each part gets the gradient of the sum."""
    return _SumOver.apply(part, group)


def sum_gradients(same: torch.Tensor, group: str) -> torch.Tensor:
    """The identity, for a value that is the same on all ranks. Its gradient is summed over the ranks of `group`."""
    return _SumGradients.apply(same, group)
