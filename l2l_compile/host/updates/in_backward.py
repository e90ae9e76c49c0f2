"""`update="in_backward"`: a parameter is updated as soon as its last gradient of the step is on the host.

With a disk, the updates of some parameters are put off to the next forward, where the disk would be idle (`DiskPlan.late`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.hooks import running_steps
from l2l_compile.host.step.sharded_state import counts_here, ranks_among, summed_over
from l2l_compile.host.step.torch_step import Hyperparameters, hyperparameters
from l2l_compile.host.updates.deferred import DeferredWriteGuard
from l2l_compile.host.updates.deferred_updates import DeferredUpdates
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward, Pushed
from l2l_compile.host.updates.norms import norm_of, sum_of_squares
from l2l_compile.host.updates.other_models import updates_of_others
from l2l_compile.host.watched_parameters import is_read_by, is_within_compiled_code, unwatched
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.sharded import local
from l2l_compile.runtime.stats import Stats


class UpdatesInBackward(DeferredUpdates):
    """Updates a parameter in the backward that closes its last pending use, in the last round of a step."""

    wants_norms = True

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        super().__init__(options, worker, wires, threads, memory)
        self._memory = memory
        self._norm: float | None = None  # of the last step
        self._squares = 0.0  # of the gradients of this step that were applied
        self._compiled_code_has_run = False  # in this step, behind its first update
        self._squares_of: dict[Parameter, float | None] = {}  # of a gradient that came in one piece; None if it came in several
        # of late updates, in the order of backward:
        self._waiting: list[tuple[Hyperparameters, dict[Parameter, torch.Tensor]]] = []
        self._guard: DeferredWriteGuard | None = None  # of parameters whose updates are late, in the step that has begun

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def describe(self, stats: Stats) -> None:
        super().describe(stats)
        stats.gradient_squares = None if self._norm is None else self._norm * self._norm

    def begin_forward(self, parameters: Sequence[Parameter], to_train: bool) -> PendingBackward | None:
        if not self._late or self.has_begun_to_update():
            self.synchronize()
        if self.has_begun_to_update() and not self.ledger.trained.isdisjoint(parameters):
            self._say_that_updates_are_early()
        return super().begin_forward(parameters, to_train)

    def synchronize(self) -> None:
        """Between backward and `optimizer.step()`, updates that wait for the next forward are made as well: all or none are seen."""
        if self._late:
            self._drain()
            self._go_on_in_forward()
        super().synchronize()

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        if pending is not None and self._late and not self.has_begun_to_update():
            self._drain()  # a forward that did not read them has not waited for their last updates
            self._groups.commit()
        super().begin_backward(pending, pushes)
        if pending is not None:
            pending.groups = hyperparameters(self.optimizer)
            if pending.last:
                self._watch_writes()
                self._begin_updates()
                for other in updates_of_others(self):
                    other.ledger.change(pending.settled)

    def update(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> Ticket | None:
        return self.worker.submit(lambda: self._update(pending, parameters))

    def end_backward(self, pending: PendingBackward) -> None:
        """Also update parameters that got a gradient in earlier rounds only."""
        super().end_backward(pending)
        if pending.ends_round:
            self.worker.submit(lambda: self._update(pending, list(self.ledger.gradients)))

    def clip(self, max_norm: float) -> None:
        """Raises `L2LError`, unless `max_norm` is infinite, so that nothing is clipped."""
        if math.isfinite(max_norm):
            raise L2LError(
                f"clipping to {max_norm} needs the norm of all gradients before the first update, and update='in_backward' has "
                "updated layers already. Use update='in_forward'"
            )

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        self._squares, self._compiled_code_has_run = 0.0, False
        self._squares_of.clear()
        self._waiting, self._guard = [], None

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """End a step whose updates have begun: the checkpoint is about to replace them."""
        loaded = super().load(optimizer, state_dict)
        if self.has_begun_to_update():
            self.forget()
        return loaded

    def has_begun_to_update(self) -> bool:
        return self.ledger.in_a_last_round

    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """Update parameters that a held forward kept waiting, and set the norm."""
        if self._compiled_code_has_run and not is_within_compiled_code():
            self._say_that_updates_are_early()
        self._compiled_code_has_run = False
        left = {**self.ledger.take_all().gradients, **{p: torch.zeros_like(local(p).detach()) for p in zeros}}
        if left:
            self.worker.submit(lambda: self._apply(left, groups))
            self._drain()
            self._finish_writes()
        self.worker.accesses.write(self._place)
        (squares,) = summed_over(self.ranks, ActionKind.STEP, (self._squares,))
        self._norm, self._squares = math.sqrt(squares), 0.0
        self._go_on_in_forward()

    @property
    def _late(self) -> frozenset[Parameter]:
        """The parameters whose updates are put off to the next forward."""
        return self._stored.late if self._stored is not None else frozenset()

    def _watch_writes(self) -> None:
        """From here to the updates that are late, no code of the user writes these parameters: the disk may read them ahead."""
        if self._late and self._guard is None:
            self._guard = DeferredWriteGuard(self.optimizer, self._late)

    def _await_updates(self) -> None:
        """Without late updates, nothing is under way behind the step: no reader has to be watched for."""
        super()._await_updates()
        if not self._late:
            self._finish_writes()

    def _go_on_in_forward(self) -> None:
        """Queue the updates that are late. What came last in backward is what the next forward reads first."""
        waiting, self._waiting = self._waiting, []
        watched, self._guard = self._guard, None
        if not waiting:
            return
        guard = watched or DeferredWriteGuard(self.optimizer, self._late)  # none was made for a step on gradients of zeros
        while waiting:
            groups, gradients = waiting.pop()
            self._defer(gradients, functools.partial(self._update_late, guard, gradients, groups))

    def _check_gradients_from_outside(self) -> None:
        outside = [p for p in self.managed if p.grad is not None]
        if outside:
            raise L2LError(
                f"{len(outside)} parameters of the optimizer have a gradient from outside of the compiled model, and update='in_backward' "
                "has made its updates already: use update='in_forward' or 'at_step'"
            )

    def begin_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizer and self._watch.is_on and not self.managed.isdisjoint(parameters_of(optimizer)):
            if self._late:
                self.synchronize()
            self._watch.end()

    def watch_again(self) -> None:
        """Not within the step of another optimizer either: `after_step_of` says what is wrong with it."""
        if not running_steps():
            super().watch_again()

    def before_reading(self) -> None:
        """Between backward and `optimizer.step()`, eager has the weights from before the step."""
        if self.has_begun_to_update():
            self._say_that_updates_are_early()
        super().before_reading()

    def before_compiled_code(self) -> None:
        """The code may be a compiled `optimizer.step()`: a warning waits until something else shows that it is not."""
        if self.has_begun_to_update():
            if self._compiled_code_has_run:
                self._say_that_updates_are_early()
            self._compiled_code_has_run = True
        super().before_reading()

    def _say_that_updates_are_early(self) -> None:
        self._say_once(
            "a parameter is read or written between backward and optimizer.step(), where update='in_backward' has updated it already: "
            "call optimizer.step() first, or use update='in_forward'"
        )

    def _being_updated(self) -> Iterable[Parameter]:
        early = self.ledger.trained if self.ledger.in_a_last_round and not self._said else ()
        return [*early, *super()._being_updated()] if self._late else early

    def _read_in_step(self, parameter: Parameter, own: torch.Tensor | None) -> torch.Tensor | None:
        if is_read_by("zero_grad", "_apply"):
            return own
        raise L2LError(
            "p.grad is read between backward and optimizer.step() (clip_grad_norm_ reads it, for example), but update='in_backward' gives "
            "each gradient to the optimizer as soon as it arrives, and keeps none. With update='in_forward', gradients can be clipped and "
            "read there, and the option max_grad_norm clips them without a copy. l2l_compile.stats(model).gradient_norm has their norm "
            "behind optimizer.step()"
        )

    def _write_in_step(self, parameter: Parameter) -> None:
        raise L2LError(
            "p.grad is set between backward and optimizer.step(), but update='in_backward' has given the gradients to the optimizer "
            "already: use update='in_forward'"
        )

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        super().collect(pending, segment)
        for pushed in segment:
            if pushed.gradient is not None:
                in_slices = pushed.slice is not None or pushed.parameter in self._squares_of
                norm = None if in_slices else pushed.norm
                is_right = norm is not None and math.isfinite(norm)  # squares may overflow on the device
                self._squares_of[pushed.parameter] = norm * norm if norm is not None and is_right else None

    def _update(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> None:
        """Update the parameters, among these, whose gradients are complete."""
        self._apply(self.ledger.take_settled(pending, parameters), pending.groups)

    def _apply(self, gradients: Mapping[Parameter, torch.Tensor], groups: Hyperparameters) -> None:
        """Update these parameters. Raises `L2LError` if a gradient is not finite."""
        self.worker.accesses.write(self._place)
        known = {p: self._squares_of.pop(p, None) for p in gradients}
        unknown = {p: self._memory.widened(g, p.dtype) for p, g in gradients.items() if known[p] is None}
        ranks = ranks_among(gradients)
        here = {p for p in gradients if counts_here(p, ranks)}
        squares = sum(square for p, square in known.items() if square is not None and p in here)
        squares += sum_of_squares(g for p, g in unknown.items() if p in here)
        if not math.isfinite(squares) and not all(torch.isfinite(norm_of(g)) for g in gradients.values()):
            raise L2LError(
                "a gradient is not finite, and update='in_backward' has already updated the layers above: "
                "update='in_forward' looks at all gradients first and skips such a step"
            )
        self._squares += squares
        late = {p: g for p, g in gradients.items() if p in self._late}
        if self.ledger.accumulate == 1:  # else all gradients of a step are kept anyway, and the plan counts them
            late = {p: self._memory.alone(g) for p, g in late.items()}
        if late:
            self._waiting.append((groups, late))
        self._step_layer({p: g for p, g in gradients.items() if p not in late}, 1.0, groups)

    def _update_late(
        self, guard: DeferredWriteGuard, gradients: Mapping[Parameter, torch.Tensor], groups: Hyperparameters
    ) -> None:
        """Update parameters in forward. Raises `L2LError` if any code has written into one of them since their backward."""
        with unwatched():
            guard.check(gradients)
            self._step_layer(gradients, 1.0, groups)
