"""fp16 with `update="at_step"`: the loss is scaled, and a step with an overflow does nothing."""
from __future__ import annotations

import torch

from .loss_scale import LossScale


class ScaledStep:
    """Watches an optimizer's steps: without finite gradients, `optimizer.step()` finds none and changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.scale = LossScale()
        self.skipped = 0
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not held:
            return
        overflow = not all(bool(torch.isfinite(p.grad).all()) for p in held)
        self.scale.update(overflow)
        if overflow:
            self.skipped += 1
            for parameter in held:
                parameter.grad = None
