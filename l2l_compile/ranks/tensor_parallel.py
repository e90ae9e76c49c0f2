"""Two operations of tensor parallel layers: a sum over ranks whose gradient is not summed, and the other way round.

They are the operators g and f of Megatron-LM (arXiv 1909.08053, section 3). Both run on the lane `compute`, inside of blocks.
"""

from __future__ import annotations

from typing import Any

import torch

_ops = torch.ops._c10d_functional


def _sum(part: torch.Tensor, group: str) -> torch.Tensor:
    return _ops.wait_tensor(_ops.all_reduce(part.contiguous(), "sum", group))


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
