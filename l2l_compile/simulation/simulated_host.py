"""The host side in virtual time: the thread that updates, and a compiled optimizer step that is one pass over memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from l2l_compile.host.step.torch_step import Hyperparameters
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.lowering.costs import nbytes
from l2l_compile.races import Unwatched, VectorClock
from l2l_compile.ranks.sharded import local
from l2l_compile.simulation.simulated_device import Clock, Clocks, SimulatedEvent


class SimulatedTicket(Ticket):
    """A piece of work that is done at a known virtual time."""

    def __init__(self, worker: Worker, clocks: Clocks, done: SimulatedEvent):
        super().__init__(worker, VectorClock())
        self._clocks, self._at = clocks, done

    def wait(self) -> None:
        self._clocks.thread.wait(self._at)

    def look(self) -> bool:
        """True: the work ran when it was submitted."""
        return True


class SimulatedWorker(Worker):
    """Does work when it is submitted, on a clock of its own. An error in the work reaches the caller at once."""

    def __init__(self, clocks: Clocks, accesses: Unwatched, name: str):
        self.accesses, self.name, self.finished = accesses, name, 0
        self._clocks, self._clock = clocks, Clock(name)

    @property
    def is_here(self) -> bool:
        """False: there is no thread."""
        return False

    def submit(self, work: Callable[[], None]) -> Ticket:
        with self._clocks.on_thread(self._clock), torch.no_grad():
            work()
        self.finished += 1
        return SimulatedTicket(self, self._clocks, self._clock.event())

    def drain(self, failed: Callable[[], None] | None = None) -> None:
        self._clocks.thread.wait(self._clock.event())

    settle = drain

    def raise_failure(self) -> None:
        """Does nothing: errors were raised by `submit`."""

    def close(self) -> None:
        """Does nothing: there is no thread."""


class WaitingWorker(SimulatedWorker):
    """Does work when somebody waits for it, from the time on at which it was submitted: it may wait for ranks that are behind this one."""

    def __init__(self, clocks: Clocks, accesses: Unwatched, name: str):
        super().__init__(clocks, accesses, name)
        self._given: deque[tuple[Callable[[], None], SimulatedEvent]] = deque()
        self._done: list[SimulatedEvent] = []

    def submit(self, work: Callable[[], None]) -> Ticket:
        self._given.append((work, self._clocks.given()))
        return _WaitingTicket(self, len(self._done) + len(self._given))

    def drain(self, failed: Callable[[], None] | None = None) -> None:
        self.done_behind(len(self._done) + len(self._given))
        super().drain(failed)

    settle = drain

    def done_behind(self, count: int) -> SimulatedEvent:
        """Do this many pieces of work, if they are not done. Returns when the last of them is."""
        while len(self._done) < count:
            work, given = self._given.popleft()
            with self._clocks.on_thread(self._clock, given), torch.no_grad():
                work()
            self.finished += 1
            self._done.append(self._clock.event())
        return self._done[count - 1] if count else self._clock.event()

    def has_done(self, count: int) -> bool:
        """Whether this many pieces of work are done."""
        return len(self._done) >= count


class _WaitingTicket(Ticket):
    def __init__(self, worker: WaitingWorker, number: int):
        super().__init__(worker, VectorClock())
        self._behind, self._number = worker, number

    def wait(self) -> None:
        self._behind._clocks.thread.wait(self._behind.done_behind(self._number))

    def look(self) -> bool:
        return self._behind.has_done(self._number)


class OnePass:
    """The step of a compiled optimizer: reads gradient, parameter and state once, writes parameter, state and wire.

    state_bytes  bytes of optimizer state for each entry of a parameter
    """

    def __init__(self, clocks: Clocks, wires: Wires, state_bytes: int):
        self._clocks, self._wires, self._state_bytes = clocks, wires, state_bytes

    def on(self, groups: Hyperparameters, gradients: Mapping[torch.nn.Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """As `CompiledStep.on`."""
        self._spend({parameter: self._moved(parameter, gradient) for parameter, gradient in gradients.items()})
        torch.autograd.graph.increment_version(gradients)
        for parameter in gradients:
            self._wires.written(parameter)
        return groups

    def _moved(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> int:
        """Bytes that the update of a parameter reads and writes."""
        shard, copy = local(parameter), self._wires.latest(parameter)
        moved = nbytes([gradient]) + 2 * nbytes([shard]) + 2 * self._state_bytes * shard.numel()
        return moved + (nbytes([copy.view]) if copy is not None else 0)

    def _spend(self, moved: Mapping[torch.nn.Parameter, int]) -> None:
        self._clocks.spend(sum(moved.values()) / self._clocks.machine.host_bandwidth)
