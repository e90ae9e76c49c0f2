"""The parameters of an optimizer."""

from __future__ import annotations

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
