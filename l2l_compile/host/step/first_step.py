"""Allocates an optimizer's state outside of the C heap, in its first step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from l2l_compile.host.hooks import StepHook
from l2l_compile.memory.heap import apart_from_the_heap, trim_the_heap
from l2l_compile.reentry import whole


class FirstStepMemory:
    """Has an optimizer allocate its state outside of the heap in its own first step, and trims the heap before every step.

    With the option update='at_step', the state, all gradients and the optimizer's temporaries exist at the same time then:
    host memory is at its peak.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._apart = ExitStack()
        self._tried = False
        optimizer.register_step_pre_hook(StepHook(self._before_step))
        optimizer.register_step_post_hook(StepHook(self._after_step))

    @whole("optimizer.step()")
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._apart.close()  # a step that failed may have left it open
        trim_the_heap()
        if not self._tried:
            self._apart.enter_context(apart_from_the_heap())

    @whole("optimizer.step()")
    def _after_step(self, *_: Any) -> None:
        self._tried = True
        self._apart.close()
