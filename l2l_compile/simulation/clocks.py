"""Clocks for measurements: of the calling thread, and of what it has a device do."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..devices.host import is_host

Work = Callable[[], object]


def caller_clock() -> Callable[[], float]:
    """Seconds of this thread at work, where it computes alone: what else the machine does is not in it. Else seconds of the wall."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch(ABC):
    """Measures work in seconds: the median of repeats, behind a warm-up."""

    def seconds(self, work: Work, repeats: int = 7, at_least: float = 0.0) -> float:
        """Of a run; there are as many `repeats`, and more until `at_least` seconds are over: other processes come and go."""
        work()
        found: list[float] = []
        while len(found) < repeats or sum(found) < at_least:
            found.append(self.once(work))
        return statistics.median(found)

    @abstractmethod
    def once(self, work: Work) -> float:
        """Seconds of one run."""


class HostStopwatch(Stopwatch):
    """Measures work of the caller."""

    def __init__(self) -> None:
        self._now = caller_clock()

    def once(self, work: Work) -> float:
        start = self._now()
        work()
        return self._now() - start


class WaitingStopwatch(Stopwatch):
    """Measures work until a device has done it, by the clock of the wall."""

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize

    def once(self, work: Work) -> float:
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start


class CudaStopwatch(Stopwatch):
    """Measures work of the current stream by events on it."""

    def once(self, work: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The one for work of a device."""
    return HostStopwatch() if is_host(device) else CudaStopwatch()
