"""Updates that are put off: they run behind `optimizer.step()`, and the next forward waits for those of a segment before it fetches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of


class DeferredUpdates(OverlappedUpdates):
    """The part of updates in forward, and of updates in backward that go on in forward, which waits for them."""

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        super().__init__(options, worker, wires, threads, memory)
        self._updating = worker  # the thread for updates that are put off
        self._tickets: dict[Parameter, Ticket] = {}
        self._tickets_change = threading.RLock()

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def _defer(self, parameters: Iterable[Parameter], update: Callable[[], None]) -> None:
        """Queue an update of these parameters, for which their next readers wait."""
        mine = tuple(parameters)
        ticket = self._updating.submit(update)
        with self._tickets_change:
            self._tickets.update(dict.fromkeys(mine, ticket))

    def wait(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if (ticket := self._tickets.get(parameter)) is not None:
                ticket.wait()
        super().wait(parameters)

    def _drain(self) -> None:
        waited_for = set(self._tickets.values())
        super()._drain()
        with self._tickets_change:  # another thread may have called, and a step may have given new ones meanwhile
            for parameter in [p for p, ticket in self._tickets.items() if ticket in waited_for]:
                del self._tickets[parameter]

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        with self._tickets_change:
            self._tickets.clear()

    def is_at_work(self) -> bool:
        return super().is_at_work() or self._updating.is_here

    def _being_updated(self) -> Iterable[Parameter]:
        with self._tickets_change:
            tickets = dict(self._tickets)
        done = {ticket: ticket.look() for ticket in set(tickets.values())}
        written = self._stored.being_written(parameters_of(self.optimizer)) if self._stored is not None else ()
        return [*(p for p, ticket in tickets.items() if not done[ticket]), *written]
