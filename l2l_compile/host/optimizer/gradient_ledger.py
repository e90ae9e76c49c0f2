"""The gradients of one training step on the host: what has arrived, and which backward calls are still to come.

A forward that a backward may follow opens a `PendingBackward`. A *round* is over when none is open: after one backward call,
or after several that were joined. A step has `accumulate` rounds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...errors import L2LError
from ...ir.captured import Part
from ..gradients import GradientMemory
from .torch_step import Hyperparameters

Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Pushed:
    """A gradient of a parameter, or of a part of it, that a segment has pushed; None where there is none."""

    parameter: Parameter
    gradient: torch.Tensor | None
    part: Part | None


_NEVER_STEPPED = (
    ". The optimizer of the option was never stepped. If this model is a deep copy of a compiled one, that optimizer is a copy as "
    "well: copy the plain model, and compile it with an optimizer of its own"
)


class PendingBackward:
    """A forward that a backward may follow.

    parameters  those that the optimizer trains and this forward reads
    open        whether the backward has not begun
    pushes      how often the backward will still hand over a gradient of each parameter
    settled     parameters that no other pending backward reads
    last        whether the backward belongs to the last round of the step
    ends_round  whether no other backward of this round is to come
    sums        gradients of parameters that are not complete in this backward
    groups      the hyperparameters when the backward began, for updates in backward
    """

    def __init__(self, ledger: GradientLedger, parameters: Iterable[Parameter]):
        self.ledger, self.parameters = ledger, frozenset(parameters)
        self.open = True
        self.pushes: Counter[Parameter] = Counter()
        self.settled: set[Parameter] = set()
        self.last = self.ends_round = False
        self.sums: dict[Parameter, torch.Tensor] = {}
        self.groups: Hyperparameters = []

    def __del__(self) -> None:
        self.ledger.close(self)


class GradientLedger:
    """Sums of gradients, and pending backwards.

    update      the value of the option, for messages
    accumulate  rounds in a step
    rounds      rounds of this step whose last backward has begun
    gradients   complete gradients of this step, summed over its rounds
    """

    def __init__(self, update: str, accumulate: int, memory: GradientMemory):
        self.update, self.accumulate, self._memory = update, accumulate, memory
        self.rounds = 0
        self._stepped = False  # whether a step has ended
        self.gradients: dict[Parameter, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._readers: Counter[Parameter] = Counter()  # open pending backwards that read a parameter

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def open(self, parameters: Iterable[Parameter]) -> PendingBackward:
        """A forward through these parameters begins."""
        pending = PendingBackward(self, parameters)
        with self._lock:
            self._readers.update(pending.parameters)
        return pending

    def close(self, pending: PendingBackward) -> None:
        """The backward begins now, or its forward was forgotten. The garbage collector may call it on any thread."""
        with self._lock:
            if pending.open:
                pending.open = False
                self._readers.subtract(pending.parameters)
                self._readers = +self._readers

    def begin_backward(self, pending: PendingBackward, pushes: Counter[Parameter]) -> None:
        """A backward begins, which will hand over gradients `pushes[p]` times for each parameter. Raises `L2LError`."""
        if not pending.open:
            raise L2LError(
                f"backward ran twice through one forward, but update={self.update!r} may have changed its weights "
                "in between: use update='at_step' for retain_graph=True"
            )
        if self.rounds >= self.accumulate:
            raise L2LError(
                f"{self.rounds + 1} backward calls without optimizer.step() between them, but the option accumulate is "
                f"{self.accumulate}: set it to the number of backward calls in a step{'' if self._stepped else _NEVER_STEPPED}"
            )
        self.close(pending)
        pending.pushes = pushes
        pending.settled = {p for p in pending.parameters if p not in self._readers}
        pending.last = self.rounds == self.accumulate - 1
        pending.ends_round = not self._readers
        self.rounds += pending.ends_round

    def end_step(self) -> None:
        """`optimizer.step()` is called. Raises `L2LError`, and drops the gradients, if a round is missing."""
        rounds, self.rounds, self._stepped = self.rounds, 0, True
        if rounds != self.accumulate:
            self.forget()
            raise L2LError(
                f"optimizer.step() after {rounds} backward calls, but the option accumulate is {self.accumulate}: "
                "set it to the number of backward calls in a step. The gradients so far were dropped"
            )

    def forget(self) -> None:
        """Drop the gradients of this step."""
        self.gradients.clear()
        self.rounds = 0

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        """The gradients of a segment are on the host; those of a shared parameter add up."""
        for pushed in segment:
            parameter = pushed.parameter
            pending.pushes[parameter] -= 1
            if pushed.gradient is not None:
                before = pending.sums.get(parameter)
                pending.sums[parameter] = self._memory.collected(before, pushed.gradient, parameter, pushed.part)
            if pending.pushes[parameter] == 0 and parameter in pending.sums:
                whole = pending.sums.pop(parameter)
                self.gradients[parameter] = self._memory.added(self.gradients.get(parameter), whole, parameter.dtype)

    def take_settled(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> dict[Parameter, torch.Tensor]:
        """Remove and return the gradients of those of these parameters that nothing more of this step will add to.

        To be asked in the last round of a step.
        """
        due = [p for p in dict.fromkeys(parameters) if p in self.gradients and p in pending.settled and pending.pushes[p] == 0]
        return {p: self.gradients.pop(p) for p in due}

    def take_all(self) -> dict[Parameter, torch.Tensor]:
        """Remove and return all gradients."""
        gradients, self.gradients = self.gradients, {}
        return gradients
