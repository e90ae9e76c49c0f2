"""fp16 with `update="at_step"`: the loss is scaled, and a step with an overflow does nothing."""

from __future__ import annotations

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.hooks import StepHook
from l2l_compile.host.step.sharded_state import ranks_among, summed_over
from l2l_compile.host.updates.loss_scale import LossScale
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.sharded import local
from l2l_compile.reentry import whole


class ScaledStep:
    """Watches an optimizer's steps. If a gradient is not finite, `optimizer.step()` finds no gradients and changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.scale = LossScale().keep_with(optimizer)
        self.skipped = 0
        self.used = False  # whether the gradients of this step were scaled here: an optimizer may serve several models
        optimizer.register_step_pre_hook(StepHook(self._before_step))

    @whole("optimizer.step()")
    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        if any(a is not None for a in (*arguments[1:], *named.values())):
            raise L2LError(
                "optimizer.step(closure) runs the model within the step, where precision='fp16' cannot skip it: use 'bf16'"
            )
        if not self.used:
            return
        self.used = False
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        shards = [local(p.grad) for p in held if p.grad is not None]
        ranks = ranks_among(parameters_of(optimizer))
        (overflows,) = summed_over(ranks, ActionKind.STEP, (float(not all(bool(torch.isfinite(g).all()) for g in shards)),))
        overflow = overflows > 0
        self.scale.update(overflow)
        if overflow:
            self.skipped += 1
            for parameter in held:
                parameter.grad = None
