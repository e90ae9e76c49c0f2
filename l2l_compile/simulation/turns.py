"""Ranks with different programs in one process: a thread each, of which one runs at a time, until it waits for another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from l2l_compile.errors import L2LError


class Turns:
    """Threads that take turns. A thread that waits for something lets the next one run that can."""

    def __init__(self, count: int):
        self._count, self._at, self._failed = count, 0, False
        self._waits: dict[int, Callable[[], bool]] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self._met: dict[int, dict[int, float]] = {}  # by number of the meeting: a figure of each thread

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of all works, each on a thread of its own. Raises the first error, and `L2LError` if all wait for one another."""
        results: list[Any] = [None] * self._count
        errors: list[BaseException] = []

        def take_part(number: int) -> None:
            try:
                self._until_its_turn(number)
                results[number] = works[number]()
            except _Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                errors.append(error)
                self._failed = True
            finally:
                with self._changed:
                    self._ended.add(number)
                    self._next(number)

        threads = [threading.Thread(target=take_part, args=(n,), name=f"l2l-rank-{n}", daemon=True) for n in range(self._count)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # of a signal handler
            self._failed = True
            raise
        if errors:
            raise errors[0]
        if self._failed:
            raise L2LError(
                "the simulated ranks wait for one another: each waits for a message that no other sends before it waits too"
            )
        return results

    def wait(self, number: int, until: Callable[[], bool]) -> None:
        """Let other threads run until `until()`, which changes only by what they do."""
        with self._changed:
            if until():
                return
            self._waits[number] = until
            self._next(number)
        self._until_its_turn(number)

    def meet(self, number: int, meeting: int, figure: float) -> float:
        """Wait until all threads have come to a meeting. Returns the largest of their figures."""
        met = self._met.setdefault(meeting, {})
        met[number] = figure
        self.wait(number, lambda: len(met) == self._count)
        return max(met.values())

    def _next(self, number: int) -> None:
        """Give the turn to the next thread that can run; if none can, all have ended or nobody ever will."""
        for step in range(1, self._count + 1):
            other = (number + step) % self._count
            if other not in self._ended and (self._failed or other not in self._waits or self._waits[other]()):
                self._at = other
                break
        else:
            self._failed = self._failed or len(self._ended) < self._count
        self._changed.notify_all()

    def _until_its_turn(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._at == number or self._failed)
            self._waits.pop(number, None)
            if self._failed:
                raise _Abandoned


class _Abandoned(BaseException):
    """Another rank has failed."""
