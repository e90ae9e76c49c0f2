"""Clocks for measurements: of the calling thread, and of the work that it gives to a device."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from l2l_compile.devices.host import is_host

Work = Callable[[], object]


def caller_clock() -> Callable[[], float]:
    """CPU seconds of this thread if PyTorch has one thread, so that other processes do not count. Else wall-clock seconds."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch(ABC):
    """Measures work in seconds: the median of repeats, after a warm-up."""

    def seconds(self, work: Work, repeats: int = 7, at_least: float = 0.0) -> float:
        """Median seconds of a run. Runs at least `repeats` times and `at_least` seconds, since other processes come and go."""
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
    """Measures work until a device has done it, in wall-clock seconds."""

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
    """The stopwatch for work on a device."""
    return HostStopwatch() if is_host(device) else CudaStopwatch()
