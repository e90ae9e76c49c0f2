"""`update="at_step"`: gradients go to `p.grad`, and `optimizer.step()` updates, as in PyTorch."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

import torch

from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.first_step import FirstStepMemory
from l2l_compile.host.step.sharded_state import counts_here, ranks_among, summed_over
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward
from l2l_compile.host.updates.interface import Updates
from l2l_compile.host.updates.norms import sum_of_squares
from l2l_compile.host.updates.scaled_step import ScaledStep
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Worker
from l2l_compile.options import Options
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.sharded import local
from l2l_compile.runtime.stats import Stats


class UpdatesAtStep(Updates):
    """With the option `optimizer`, watches its steps: memory of the first one, the loss scale of fp16, norms for `stats`."""

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        self._optimizer = options.optimizer
        self._watched = weakref.WeakSet()
        self._scaled: ScaledStep | None = None
        if options.optimizer is not None:
            self._first_step = FirstStepMemory(options.optimizer)
            if options.precision == "fp16":
                self._scaled = ScaledStep(options.optimizer)
                self.scale = self._scaled.scale

    @property
    def is_idle(self) -> bool:
        return self._scaled is None or not self._scaled.used

    def describe(self, stats: Stats) -> None:
        super().describe(stats)
        if self._scaled is not None:
            stats.skipped_steps = self._scaled.skipped

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        if self._scaled is not None:
            self._scaled.used = True

    def squares_of_returned(self, gradients: Iterable[torch.Tensor]) -> float | None:
        if self._optimizer is None:
            return None
        found = list(gradients)
        ranks = ranks_among(found)
        here = sum_of_squares(local(g) for g in found if counts_here(g, ranks))
        return summed_over(ranks, ActionKind.NORM, (here,))[0]
