"""`update="in_backward"`: a parameter is updated as soon as its last gradient of the step is on the host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import L2LError
from ...options import Options
from ...ranks.announcements import Kind
from ...runtime.step import Stats
from ..gradients import GradientMemory
from ..wire import Wires
from ..worker import Ticket, Worker
from .divided import counts_here, ranks_among, summed_over
from .gradient_ledger import Parameter, PendingBackward, Pushed
from .torch_step import Hyperparameters, hyperparameters
from .updates import UpdatesBehindTheDevice, sum_of_squares


class UpdatesInBackward(UpdatesBehindTheDevice):
    """Updates a parameter in the backward that closes its last pending use, in the last round of a step."""

    wants_norms = True

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        super().__init__(options, worker, wires, threads, memory)
        self._memory = memory
        self._norm = 0.0
        self._squares = 0.0  # of the gradients of this step that were applied
        self._squares_of: dict[Parameter, float | None] = {}  # of a gradient that came in one piece; None if it came in several

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def describe(self, stats: Stats) -> None:
        super().describe(stats)
        stats.gradient_squares = self._norm**2

    def begin_forward(self, parameters: Iterable[Parameter], to_train: bool) -> PendingBackward | None:
        self.synchronize()
        return super().begin_forward(parameters, to_train)

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        super().begin_backward(pending, pushes)
        if pending is not None:
            pending.groups = hyperparameters(self.optimizer)

    def update(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> Ticket | None:
        return self.worker.submit(lambda: self._update(pending, parameters))

    def end_backward(self, pending: PendingBackward) -> None:
        """Also update parameters that got a gradient in earlier rounds only."""
        if pending.ends_round:
            self.worker.submit(lambda: self._update(pending, list(self._ledger.gradients)))

    def clip(self, max_norm: float) -> None:
        """Raises `L2LError`, unless `max_norm` is infinite, so that nothing is clipped."""
        if math.isfinite(max_norm):
            raise L2LError(
                f"clipping to {max_norm} needs the norm of all gradients before the first update, and update='in_backward' has "
                "updated layers already. Use update='in_forward'"
            )

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        self._squares = 0.0
        self._squares_of.clear()

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """End a step whose updates have begun: the checkpoint is about to replace them."""
        loaded = super()._load(optimizer, state_dict)
        if self._updates_have_begun():
            self.forget()
        return loaded

    def _updates_have_begun(self) -> bool:
        return self._ledger.in_last_round

    def _end_step(self, groups: Hyperparameters) -> None:
        """Update parameters that a held forward kept waiting, and set the norm. Raises `L2LError` for gradients in `p.grad`."""
        if left := self._ledger.take_all():
            self.worker.submit(lambda: self._apply(left, groups))
            self._drain()
        self.worker.accesses.write(self._place)
        (squares,) = summed_over(self.ranks, Kind.STEP, (self._squares,))
        self._norm, self._squares = math.sqrt(squares), 0.0
        outside = [p for p in self.managed if p.grad is not None]
        if outside:
            raise L2LError(
                f"{len(outside)} parameters of the optimizer have a gradient from outside of the compiled model, and update='in_backward' "
                "has made its updates already: use update='in_forward' or 'at_step'"
            )

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        super().collect(pending, segment)
        for pushed in segment:
            if pushed.gradient is not None:
                in_pieces = pushed.part is not None or pushed.parameter in self._squares_of
                norm = None if in_pieces else pushed.norm
                self._squares_of[pushed.parameter] = norm**2 if norm is not None else None

    def _update(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> None:
        """Update the parameters, among these, whose gradients are complete."""
        self._apply(self._ledger.take_settled(pending, parameters), pending.groups)

    def _apply(self, gradients: Mapping[Parameter, torch.Tensor], groups: Hyperparameters) -> None:
        """Update these parameters. Raises `L2LError` if a gradient is not finite."""
        self.worker.accesses.write(self._place)
        known = {p: self._squares_of.pop(p, None) for p in gradients}
        unknown = {p: self._memory.widened(g, p.dtype) for p, g in gradients.items() if known[p] is None}
        ranks = ranks_among(gradients)
        here = {p for p in gradients if counts_here(p, ranks)}
        squares = sum(square for p, square in known.items() if square is not None and p in here)
        squares += sum_of_squares(g for p, g in unknown.items() if p in here)
        if not math.isfinite(squares):
            raise L2LError(
                "a gradient is not finite, and update='in_backward' has already updated the layers above: "
                "update='in_forward' looks at all gradients first and skips such a step"
            )
        self._squares += squares
        self._step_layer(gradients, 1.0, groups)
