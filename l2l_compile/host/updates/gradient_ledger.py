"""The gradients of one training step on the host: which have arrived, and which backward calls are still to come.

A forward that a backward may follow opens a `PendingBackward`. A *round* is over when no pending backward is open: after one
backward call, or after one for each of several forwards. A step has `accumulate` rounds; if `accumulate` is a function, the
step ends with the round for which it returns True. `optimizer.step()` ends the step and its last round. A forward whose output
is held, but was never differentiated, is given up then.

Models of one class share the program of equal `torch.compile` calls, and so this ledger. Each has rounds of its own in a step: a
backward behind the last round begins the rounds of another model, if none of its parameters was in a last round.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import Hyperparameters
from l2l_compile.ir.captured import ParameterSlice
from l2l_compile.memory.finalizers import members, taken
from l2l_compile.update_modes import MODES

Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Pushed:
    """A gradient of a parameter, or of a slice of it, that a segment has pushed; None where there is none.

    norm  of the gradient, where the device has taken it
    """

    parameter: Parameter
    gradient: torch.Tensor | None
    slice: ParameterSlice | None
    norm: float | None = None


_NEVER_STEPPED = (
    ". The optimizer of the option was never stepped, and another one has its parameters. If this model is a deep copy of a compiled "
    "one, the optimizer of the option is a copy as well: copy the plain model, and compile it with an optimizer of its own"
)
_HELD = (
    ". An output of this step is still referenced, and backward was not called on it, so the step cannot end: delete it, or run "
    "such a forward under torch.no_grad()"
)


class StepGradients:
    """The gradients of one step. With turns in flight, the last of them arrive when the next step has begun.

    gradients  complete gradients, summed over the rounds of the step
    arrived    parameters that have had a complete gradient
    norms      of complete gradients, each with the gradient that it is of
    segments   parameters of each segment, in the order of backward
    in_flight  backwards of which gradients are still to come
    """

    def __init__(self) -> None:
        self.gradients: dict[Parameter, torch.Tensor] = {}
        self.arrived: set[Parameter] = set()
        self.norms: dict[Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        self.segments: dict[tuple[Parameter, ...], None] = {}
        self.in_flight: set[PendingBackward] = set()

    @property
    def parameters(self) -> set[Parameter]:
        """The parameters that have a gradient, or get one."""
        return self.arrived.union(self.gradients, *(pending.pushes for pending in self.in_flight))


class PendingBackward:
    """A forward that a backward may follow.

    parameters  the parameters that the optimizer trains and this forward reads
    step        the number of the step in which the forward ran
    number      of this forward among all
    open        whether the backward has not begun, and may still begin
    pushes      how often the backward will still hand over a gradient of each parameter
    settled     parameters that no other pending backward reads
    last        whether the backward belongs to the last round of the step
    ends_round  whether no other backward of this round is to come
    sums        gradients that are not complete yet in this backward, by parameter
    of_step     the gradients of its step
    groups      the hyperparameters when the backward began, for updates in backward
    changed     parameters that the backward of another compiled model has updated since
    """

    def __init__(self, ledger: GradientLedger, parameters: Iterable[Parameter]):
        self.ledger, self.parameters, self.step = ledger, frozenset(parameters), ledger.steps
        self.number = next(ledger.numbers)
        self.open = True
        self.pushes: Counter[Parameter] = Counter()
        self.settled: set[Parameter] = set()
        self.last = self.ends_round = False
        self.sums: dict[Parameter, torch.Tensor] = {}
        self.of_step = ledger.of_step
        self.groups = Hyperparameters()
        self.changed: set[Parameter] = set()

    def check(self) -> None:
        """Raise `L2LError` if no backward may run any more."""
        self.ledger.check(self)

    def give_up(self) -> None:
        """No backward for the optimizer will run."""
        self.ledger.close(self)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # not if `__init__` was interrupted
            self.ledger.forgotten.append(self.number)


class GradientLedger:
    """Sums of gradients, and pending backwards.

    update         the value of the option, for messages
    accumulate     rounds in a step, or a function that says in each whether it is the last of its step
    steps          how many steps have ended
    has_begun      whether a backward of this step has begun
    rounds         rounds of this step whose last backward has begun, of all models
    in_last_round  whether the backward that began last belongs to the last round of its step
    complete       whether the last round of the model whose backward began last is among them
    closed         parameters of rounds that were the last of their model
    forgotten      numbers of forwards that nothing holds any more, noted by finalizers
    trained        parameters of forwards whose backward of this step has begun
    of_step        the gradients of this step
    """

    def __init__(
        self,
        update: str,
        accumulate: int | Callable[[], bool],
        memory: GradientMemory,
        another_optimizer_has_them: Callable[[], bool],
    ):
        self._another_optimizer_has_them = another_optimizer_has_them
        self._pending: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self.update, self.accumulate, self._memory = update, accumulate, memory
        self.steps = self.rounds = 0
        self.has_begun = self.complete = False
        self.in_last_round = self._round_is_open = False
        self._rounds_of_others = 0  # in this step, of models whose last round is over
        self.trained: set[Parameter] = set()
        self.closed: set[Parameter] = set()
        self._in_round: set[Parameter] = set()  # parameters of this round so far
        self.of_step = StepGradients()
        self.numbers = itertools.count()
        self.forgotten: deque[int] = deque()
        self._open: dict[int, frozenset[Parameter]] = {}  # of this step: by number, the parameters of each open pending backward

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[Parameter, torch.Tensor]:
        """The complete gradients of this step."""
        return self.of_step.gradients

    @property
    def is_idle(self) -> bool:
        """Whether no backward of this step has begun, and no forward waits for one."""
        return not self.has_begun and self._open.keys() <= set(self.forgotten)

    def open(self, parameters: Iterable[Parameter]) -> PendingBackward:
        """A forward through these parameters begins."""
        self._end_round_without_the_rest()
        pending = PendingBackward(self, parameters)
        self._pending.add(pending)
        self._open[pending.number] = pending.parameters
        return pending

    def change(self, parameters: Collection[Parameter]) -> None:
        """Another compiled model is about to update these parameters."""
        for pending in members(self._pending):
            pending.changed.update(pending.parameters.intersection(parameters))

    def close(self, pending: PendingBackward) -> None:
        """The backward begins now, or no backward will run."""
        pending.open = False
        self._open.pop(pending.number, None)

    def _still_open(self) -> dict[int, frozenset[Parameter]]:
        """The open pending backwards of this step, without those that were forgotten."""
        for number in taken(self.forgotten):
            self._open.pop(number, None)
        return self._open

    def begin_backward(self, pending: PendingBackward, pushes: Counter[Parameter]) -> None:
        """A backward begins, which will hand over gradients `pushes[p]` times for each parameter. Raises `L2LError`."""
        self.check(pending)
        if not self.has_begun:
            self.forget()  # what is left of a step whose end was interrupted
        if not self.closed.isdisjoint(pending.parameters):
            raise L2LError(
                f"{self.rounds + 1} backward calls without optimizer.step() between them, but {self._expected(self.rounds)}. If "
                f"optimizer.step() is missing in the loop, call it behind each step. {MODES[self.update].left_out}{self.never_stepped}"
            )
        self.close(pending)
        if self.complete:
            self._rounds_of_others, self.complete = self.rounds, False
        self.trained |= pending.parameters
        pending.pushes, pending.of_step = pushes, self.of_step
        others = self._still_open()
        pending.settled = set(pending.parameters.difference(*others.values()))
        pending.last = self.in_last_round = self._is_last_round()
        pending.ends_round = not others
        self._round_is_open = True
        self._in_round |= pending.parameters
        if pending.ends_round:
            self._end_round()
        self.has_begun = True  # at last: a signal handler may raise an error at any line

    @property
    def in_a_last_round(self) -> bool:
        """Whether a backward of this step has begun that belongs to the last round of its model."""
        return self.has_begun and (self.in_last_round or bool(self.closed))

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
        if pending.changed:
            raise L2LError(
                f"two compiled models train {len(pending.changed)} of the same parameters in one step, and the backward of the one has updated "
                "them before the backward of the other: compile one module that holds both, or use update='at_step'"
            )

    def _end_round(self) -> None:
        self.rounds += 1
        self._round_is_open, self.complete = False, self.in_last_round
        if self.complete:
            self.closed |= self._in_round
        self._in_round.clear()

    def _end_round_without_the_rest(self) -> None:
        """End a round that has had a backward, if its other forwards were all forgotten since."""
        if self._round_is_open and not self._still_open():
            self._end_round()

    @property
    def never_stepped(self) -> str:
        """A sentence for error messages, if another optimizer is stepped in the place of that of the option."""
        return "" if self.steps or not self._another_optimizer_has_them() else _NEVER_STEPPED

    def _is_last_round(self) -> bool:
        return (
            bool(self.accumulate()) if callable(self.accumulate) else self.rounds - self._rounds_of_others == self.accumulate - 1
        )

    def _expected(self, rounds: int) -> str:
        if callable(self.accumulate):
            return f"the option accumulate has called number {rounds} {'' if self.complete else 'not '}the last of the step"
        return (
            f"the option accumulate is {self.accumulate}: set it to the number of backward calls in a step, or to a function that says "
            "whether the next one is the last"
        )

    def end_step(self) -> None:
        """`optimizer.step()` is called. Ends the last round. If a round is missing, drops gradients and raises `L2LError`."""
        self._end_round_without_the_rest()
        held, self._open = bool(self._still_open()), {}
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
        self.of_step.gradients.clear()
        self.of_step = StepGradients()
        self._begin_step()

    def _begin_step(self) -> None:
        self.rounds, self.has_begun, self.complete = 0, False, False
        self.in_last_round = self._round_is_open = False
        self._rounds_of_others = 0
        for parameters in (self.trained, self.closed, self._in_round):
            parameters.clear()

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        """The gradients of a segment are on the host. Gradients of a shared parameter are summed."""
        of_step = pending.of_step
        for pushed in segment:
            parameter = pushed.parameter
            pending.pushes[parameter] -= 1
            if pushed.gradient is not None:
                before = pending.sums.get(parameter)
                pending.sums[parameter] = self._memory.collected(before, pushed.gradient, parameter, pushed.slice)
            if pending.pushes[parameter] == 0 and parameter in pending.sums:
                whole = pending.sums.pop(parameter)
                of_step.arrived.add(parameter)
                of_step.gradients[parameter] = self._memory.added(of_step.gradients.get(parameter), whole, parameter.dtype)

    def settled(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters, among these, whose gradient is complete: nothing else in this step will add to it."""
        if not pending.last:
            return []
        return [
            p
            for p in dict.fromkeys(parameters)
            if p in pending.of_step.gradients and p in pending.settled and pending.pushes[p] == 0
        ]

    def take_settled(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> dict[Parameter, torch.Tensor]:
        """Remove and return the gradients of these parameters that are complete."""
        return {p: pending.of_step.gradients.pop(p) for p in self.settled(pending, parameters)}

    def take_all(self) -> StepGradients:
        """The gradients of the step that ends. Those that arrive from now on, but for its turns in flight, are of the next one."""
        of_step, self.of_step = self.of_step, StepGradients()
        return of_step
