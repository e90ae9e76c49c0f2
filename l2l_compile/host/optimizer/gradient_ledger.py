"""The gradients of one training step on the host: which have arrived, and which backward calls are still to come.

A forward that a backward may follow opens a `PendingBackward`. A *round* is over when no pending backward is open: after one
backward call, or after one for each of several forwards. A step has `accumulate` rounds; if `accumulate` is a function, the
step ends with the round for which it returns True. `optimizer.step()` ends the step and its last round. A forward whose output
is held, but was never differentiated, is given up then.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ...errors import L2LError
from ...ir.captured import Part
from ..gradients import GradientMemory
from .torch_step import Hyperparameters

Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Pushed:
    """A gradient of a parameter, or of a part of it, that a segment has pushed; None where there is none.

    norm  of the gradient, where the device has taken it
    """

    parameter: Parameter
    gradient: torch.Tensor | None
    part: Part | None
    norm: float | None = None


_LEFT_OUT = {
    "in_forward": "To leave a step out, call optimizer.zero_grad() after its backward",
    "in_backward": "A step cannot be left out after its backward, which has made its updates: end it with optimizer.step()",
}
_NEVER_STEPPED = (
    ". The optimizer of the option was never stepped. If this model is a deep copy of a compiled one, that optimizer is a copy as "
    "well: copy the plain model, and compile it with an optimizer of its own"
)
_HELD = (
    ". An output of this step is held, and backward was not called on it, so that no round has ended: let go of it, or run such a "
    "forward under torch.no_grad()"
)


class PendingBackward:
    """A forward that a backward may follow.

    parameters  the parameters that the optimizer trains and this forward reads
    step        the number of the step in which the forward ran
    open        whether the backward has not begun, and may still begin
    pushes      how often the backward will still hand over a gradient of each parameter
    settled     parameters that no other pending backward reads
    last        whether the backward belongs to the last round of the step
    ends_round  whether no other backward of this round is to come
    sums        gradients that are not complete yet in this backward, by parameter
    groups      the hyperparameters when the backward began, for updates in backward
    """

    def __init__(self, ledger: GradientLedger, parameters: Iterable[Parameter]):
        self.ledger, self.parameters, self.step = ledger, frozenset(parameters), ledger.steps
        self.open = True
        self.pushes: Counter[Parameter] = Counter()
        self.settled: set[Parameter] = set()
        self.last = self.ends_round = False
        self.sums: dict[Parameter, torch.Tensor] = {}
        self.groups: Hyperparameters = []

    def check(self) -> None:
        """Raise `L2LError` if no backward may run any more."""
        self.ledger.check(self)

    def give_up(self) -> None:
        """No backward for the optimizer will run."""
        self.ledger.close(self)

    def __del__(self) -> None:
        self.give_up()


class GradientLedger:
    """Sums of gradients, and pending backwards.

    update         the value of the option, for messages
    accumulate     rounds in a step, or a function that says in each whether it is the last of its step
    steps          how many steps have ended
    has_begun      whether a backward of this step has begun
    rounds         rounds of this step whose last backward has begun
    in_last_round  whether the backward that began last belongs to the last round of its step
    complete       whether the last round of this step is among them
    trained        parameters of forwards whose backward of this step has begun
    gradients      complete gradients of this step, summed over its rounds
    """

    def __init__(self, update: str, accumulate: int | Callable[[], bool], memory: GradientMemory):
        self.update, self.accumulate, self._memory = update, accumulate, memory
        self.steps = self.rounds = 0
        self.has_begun = self.complete = False
        self.in_last_round = self._round_is_open = False
        self.trained: set[Parameter] = set()
        self.gradients: dict[Parameter, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._readers: Counter[Parameter] = Counter()  # open pending backwards that read a parameter

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no backward of this step has begun, and no forward waits for one."""
        return not self.has_begun and not self._readers

    def open(self, parameters: Iterable[Parameter]) -> PendingBackward:
        """A forward through these parameters begins."""
        self._end_round_without_the_rest()
        pending = PendingBackward(self, parameters)
        with self._lock:
            self._readers.update(pending.parameters)
        return pending

    def close(self, pending: PendingBackward) -> None:
        """The backward begins now, or its forward was forgotten. The garbage collector may call it on any thread."""
        with self._lock:
            if pending.open:
                pending.open = False
                if pending.step == self.steps:
                    self._readers.subtract(pending.parameters)
                    self._readers = +self._readers

    def begin_backward(self, pending: PendingBackward, pushes: Counter[Parameter]) -> None:
        """A backward begins, which will hand over gradients `pushes[p]` times for each parameter. Raises `L2LError`."""
        self.check(pending)
        if self.complete:
            raise L2LError(
                f"{self.rounds + 1} backward calls without optimizer.step() between them, but {self._expected(self.rounds)}. "
                f"{_LEFT_OUT[self.update]}{self.never_stepped}"
            )
        self.close(pending)
        self.has_begun = True
        self.trained |= pending.parameters
        pending.pushes = pushes
        pending.settled = {p for p in pending.parameters if p not in self._readers}
        pending.last = self.in_last_round = self._is_last_round()
        pending.ends_round = not self._readers
        self._round_is_open = True
        if pending.ends_round:
            self._end_round()

    def check(self, pending: PendingBackward) -> None:
        """Raise `L2LError` if no backward may run through this forward any more."""
        if pending.step != self.steps:
            raise L2LError(
                f"backward through a forward that ran before optimizer.step(), but update={self.update!r} has changed its weights "
                "since: call backward before optimizer.step()"
            )
        if not pending.open:
            raise L2LError(
                f"backward ran twice through one forward, but update={self.update!r} may have changed its weights "
                "in between: use update='at_step' for retain_graph=True"
            )

    def _end_round(self) -> None:
        self.rounds += 1
        self._round_is_open, self.complete = False, self.in_last_round

    def _end_round_without_the_rest(self) -> None:
        """End a round that has had a backward, if its other forwards were all forgotten since."""
        if self._round_is_open and not self._readers:
            self._end_round()

    @property
    def never_stepped(self) -> str:
        """A sentence for error messages, if the optimizer of the option has made no step yet."""
        return "" if self.steps else _NEVER_STEPPED

    def _is_last_round(self) -> bool:
        return bool(self.accumulate()) if callable(self.accumulate) else self.rounds == self.accumulate - 1

    def _expected(self, rounds: int) -> str:
        if callable(self.accumulate):
            return f"the option accumulate has called number {rounds} {'' if self.complete else 'not '}the last of the step"
        return f"the option accumulate is {self.accumulate}: set it to the number of backward calls in a step"

    def end_step(self) -> None:
        """`optimizer.step()` is called. Ends the last round. If a round is missing, drops gradients and raises `L2LError`."""
        self._end_round_without_the_rest()
        with self._lock:
            held, self._readers = bool(self._readers), Counter()
            self.steps += 1
        held_last = held and self.in_last_round and (self.accumulate == 1 or callable(self.accumulate))
        if not self.complete and not held_last:
            rounds, expected = self.rounds, self._expected(self.rounds)
            self.forget()
            raise L2LError(
                f"optimizer.step() after {rounds} backward calls, but {expected}{_HELD if held else ''}. "
                "The gradients so far were dropped"
            )
        self._begin_step()

    def forget(self) -> None:
        """Drop the gradients of this step."""
        self.gradients.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self.rounds, self.has_begun, self.complete = 0, False, False
        self.in_last_round = self._round_is_open = False
        self.trained.clear()

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        """The gradients of a segment are on the host. Gradients of a shared parameter are summed."""
        for pushed in segment:
            parameter = pushed.parameter
            pending.pushes[parameter] -= 1
            if pushed.gradient is not None:
                before = pending.sums.get(parameter)
                pending.sums[parameter] = self._memory.collected(before, pushed.gradient, parameter, pushed.part)
            if pending.pushes[parameter] == 0 and parameter in pending.sums:
                whole = pending.sums.pop(parameter)
                self.gradients[parameter] = self._memory.added(self.gradients.get(parameter), whole, parameter.dtype)

    def settled(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters, among these, whose gradient is complete: nothing else in this step will add to it."""
        if not pending.last:
            return []
        return [p for p in dict.fromkeys(parameters) if p in self.gradients and p in pending.settled and pending.pushes[p] == 0]

    def take_settled(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> dict[Parameter, torch.Tensor]:
        """Remove and return the gradients of these parameters that are complete."""
        return {p: self.gradients.pop(p) for p in self.settled(pending, parameters)}

    def take_all(self) -> dict[Parameter, torch.Tensor]:
        """Remove and return all gradients."""
        gradients, self.gradients = self.gradients, {}
        return gradients
