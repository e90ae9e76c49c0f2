"""`delay=1` with turns in flight: `optimizer.step()` ends a step before its last gradients are there (PipeDream-2BW, arXiv 2006.09503).

    call t        forward of batch t; back comes what is left of batch t - 1, and of batch t what can
    step t        the weights of the next call are those of update t - 1, which is done by now; hyperparameters are noted
    call t + 1    the last gradients of batch t arrive, and its updates begin

Gradients, norms, updates and the weights that are read are those of `delay=1`. So is the loss scale, but for its delay: like the weights,
that of a step accounts for all steps until the one before the last. The last one is still in flight when the step begins.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.double_buffer import DelayedWires
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import Hyperparameters
from l2l_compile.host.updates.delayed import DelayedUpdates
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward, StepGradients
from l2l_compile.host.updates.in_forward import DeferredStep, StepFigures
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import local
from l2l_compile.runtime.stats import Stats


@dataclass(eq=False)
class _Coming:
    """A step that has ended, some of whose gradients are still in flight; the parameters that get them, and those that get zeros."""

    step: DeferredStep
    of_step: StepGradients
    parameters: frozenset[Parameter]
    zeros: Sequence[Parameter]


class UpdatesWithoutFlush(DelayedUpdates):
    """As `DelayedUpdates`, for schedules of turns. Whoever needs all gradients or all updates of a step has the rest of it run first."""

    def __init__(
        self, options: Options, worker: Worker, wires: DelayedWires, threads: int, memory: GradientMemory, updating: Worker
    ):
        super().__init__(options, worker, wires, threads, memory, updating)
        self._coming: _Coming | None = None
        self._stepping: int | None = None  # the thread within `optimizer.step()`
        self._drain_turns: Callable[[], None] = lambda: None
        self._shown = StepFigures()

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def describe(self, stats: Stats) -> None:
        """The figures of the step before the last one, on all ranks: some have not looked at the last one yet, and wait for the others."""
        self._shown.add_to(stats)
        self._describe_disk(stats)
        if self.scale is not None:
            stats.loss_scale = self.scale.of_next_step

    def drains_with(self, drain: Callable[[], None]) -> None:
        self._drain_turns = drain

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        """Waits for nothing."""
        super(DelayedUpdates, self).begin_backward(pending, pushes)

    def next_scale(self) -> float:
        return self.scale_now()

    def scale_now(self) -> float:
        return self.scale.of_next_step if self.scale is not None else 1.0

    def begin_turns(self, pending: PendingBackward) -> None:
        pending.of_step.in_flight.add(pending)

    def end_turns(self, pending: PendingBackward) -> None:
        of_step = pending.of_step
        of_step.in_flight.discard(pending)
        if self._coming is not None and self._coming.of_step is of_step and not of_step.in_flight:
            coming, self._coming = self._coming, None
            self._launch(coming)

    def begin_own_step(self) -> None:
        """Waits for the updates of the step before, and not for turns that are in flight."""
        self._stepping = threading.get_ident()
        try:
            super().begin_own_step()
        finally:
            self._stepping = None

    def _drain(self) -> None:
        if self._stepping != threading.get_ident():
            self._drain_turns()
        super()._drain()

    def _collected(self, parameter: Parameter) -> torch.Tensor | None:
        self._drain_turns()
        return super()._collected(parameter)

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        self._coming = None

    def _being_updated(self) -> Iterable[Parameter]:
        coming = self._coming
        return [*super()._being_updated(), *(coming.parameters if coming is not None else ())]

    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """The scale of the next step is the one now: the look at this step may be behind it, and may not be."""
        scale = self.scale.value if self.scale is not None else 1.0
        self.worker.accesses.read(self._place_of_norm)
        self._shown = self._figures()
        if self.ledger.of_step.in_flight:
            self._end_in_flight(groups, zeros)
        else:
            super()._end_step(groups, zeros)
        if self.scale is not None:
            self.scale.of_next_step = scale

    def _end_in_flight(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """As `_end_step`, of a step whose last gradients are still to come."""
        if any(p.grad is not None for p in parameters_of(self.optimizer)):
            raise L2LError(
                "gradients of this step are in flight, and others were set in p.grad from outside of the compiled model: call "
                "l2l_compile.synchronize(model) before you set them"
            )
        of_step = self.ledger.take_all()
        parameters = frozenset((*of_step.parameters, *zeros))
        self._wires.turn()
        self._wires.updating = parameters
        self._coming = _Coming(self._step_of(groups, parameters), of_step, parameters, zeros)

    def _announce_step(self) -> None:
        """The next forward tells the other ranks of this step."""

    def _launch(self, coming: _Coming) -> None:
        """Queue a look at all gradients of a step, and its updates, behind the last gradients on the host lane."""
        self._begin_updates()
        collected = self.worker.submit(lambda: None)
        self._looked = self._updating.submit(functools.partial(self._look_behind, collected, coming))
        self._defer(coming.parameters, functools.partial(self._update_all, coming))

    # ---- called on the lane of updates -------------------------------------------------------------------------------

    def _look_behind(self, collected: Ticket, coming: _Coming) -> None:
        collected.wait()
        coming.of_step.gradients.update({p: torch.zeros_like(local(p).detach()) for p in coming.zeros})
        self._look_at(coming.step, coming.of_step)

    def _update_all(self, coming: _Coming) -> None:
        for mine in self._in_order_of_forward(coming.of_step):
            self._update(coming.step, {p: coming.of_step.gradients.pop(p) for p in mine})
