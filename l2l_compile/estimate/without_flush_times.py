"""The host side of steps without a flush in virtual time, as `host/updates/without_flush.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from l2l_compile.estimate.host_times import HostTimes, OfStep
from l2l_compile.estimate.optimizer_times import OptimizerTimes
from l2l_compile.estimate.rank_links import RankLinks
from l2l_compile.options import Options
from l2l_compile.simulation.simulated_device import Clocks, SimulatedEvent


class HostTimesWithoutFlush(HostTimes):
    """`optimizer.step()` ends a step before its last gradients are there. Updates wait for ranks that may be behind this one.

    So they are done when this rank waits for them, from the time on at which they were given.
    """

    def __init__(self, clocks: Clocks, options: Options, optimizer: OptimizerTimes, links: RankLinks):
        super().__init__(clocks, options, optimizer, links)
        self._turns: OfStep | None = None  # of the last backward: the step whose turns are in flight
        self._coming: OfStep | None = None  # a step that has ended, whose last gradients are in flight
        self._waiting: list[tuple[Callable[[], None], SimulatedEvent]] = []  # for the thread that updates

    def step(self) -> None:
        self._catch_up()
        for thread in (self.worker, self.updating):
            self.clocks.thread.wait(thread.event())
        if self._turns is not None:
            self._coming = self._turns
        else:
            self._launch(self._of_step)
        self._turns, self._of_step = None, OfStep()

    def begin_turns(self) -> OfStep:
        self._turns = self._of_step
        return self._of_step

    def end_turns(self, of_step: OfStep | None) -> None:
        if self._turns is of_step:
            self._turns = None
        if of_step is not None and self._coming is of_step:
            self._coming = None
            self._launch(of_step)

    def _launch(self, of_step: OfStep) -> None:
        """Queue a look at all gradients of a step, and its updates, behind the last gradients on the host lane."""
        collected = self._submit(self.worker, lambda: None)

        def look() -> None:
            self.clocks.thread.wait(collected)
            self.links.meet(self.clocks)

        for work in (look, functools.partial(self._update_all, of_step)):
            self._waiting.append((work, self.clocks.given()))

    def _update_all(self, of_step: OfStep) -> None:
        for mine in self._in_order_of_forward(of_step):
            self._update(of_step, mine)

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for work, given in waiting:
            with self.clocks.on_thread(self.updating, given):
                work()
