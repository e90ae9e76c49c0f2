"""Stashes on a disk, on sizes alone: as `runtime/stored_stashes.py`, with a clock for the thread of each way."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.lanes import Lane
from l2l_compile.runtime.stored_stashes import StashWindow
from l2l_compile.simulation.simulated_device import Clock, Clocks, SimulatedEvent


class _LoadedTimes:
    """A value on its way from the disk: whoever reads it waits."""

    def __init__(self, clocks: Clocks, read: SimulatedEvent):
        self._clocks, self._read = clocks, read

    def complete(self, value: TimedValue) -> None:
        """Wait until it is in memory."""
        value.arrival = None
        self._clocks.thread.wait(self._read)


class StashTimes:
    """As `StashesOnDisk`. All methods are called by the caller."""

    def __init__(self, clocks: Clocks):
        self._clocks, self._writer, self._reader = clocks, Clock(Lane.DISK_WRITE), Clock(Lane.DISK_READ)
        self._window = StashWindow[SimulatedEvent, TimedValue]()

    def begin_forward(self, sizes: Sequence[int]) -> None:
        """A forward begins that stores so many bytes in each stash."""
        self._window.begin_forward(sizes)

    def put(self, x: TimedValue, size: int) -> TimedValue:
        """Have a value written. Waits while too much is being written."""
        with self._clocks.on_thread(self._writer):
            if x.event is not None:
                self._clocks.thread.wait(x.event)
            written = self._move(Lane.DISK_WRITE, x)
        for earlier in self._window.stored(size, written):
            self._clocks.thread.wait(earlier)
        return TimedValue(x.parts, equal=x.equal, written=written)

    def get(self, x: TimedValue, size: int) -> TimedValue:
        """Have a value read. Waits while the device has still to copy too much of what was read before."""
        for copied in self._window.room_for(size):
            self._clocks.thread.wait(copied)
        assert x.written is not None, "a value in memory"
        with self._clocks.on_thread(self._reader):
            self._clocks.thread.wait(x.written)
            read = self._move(Lane.DISK_READ, x)
        result = TimedValue(x.parts, equal=x.equal, pinned=True, arrival=_LoadedTimes(self._clocks, read))
        self._window.loaded(size, result)
        return result

    def _move(self, lane: Lane, x: TimedValue) -> SimulatedEvent:
        """The running thread moves a value, before anything that updates move. Micro-batches with the same rows are moved once."""
        parts, clocks = x.parts[:1] if x.equal else x.parts, self._clocks
        for size in parts:
            seconds = whole_pages(size) / clocks.disk_rate("disk_write" if lane is Lane.DISK_WRITE else "disk_read")
            clocks.steal_from_updates(lane, clocks.thread.now, seconds)
            clocks.spend(seconds)
        return clocks.thread.event()
