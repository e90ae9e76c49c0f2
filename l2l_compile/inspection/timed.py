"""A measured timeline, in the form of a simulated one: when the lanes of a device, the caller and the host lane were at work.

CUDA lanes are measured by events on their streams, other lanes by the host's clock. If the host is the device, the work of its
lanes counts as the caller's own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from l2l_compile.devices.device import Device
from l2l_compile.devices.labels import label_of_micro_batch
from l2l_compile.devices.observed import Observer, Work
from l2l_compile.lanes import Lane
from l2l_compile.timeline import Span, Timeline


@dataclass(eq=False)
class _Given:
    """Work that a lane or a thread was given.

    begun   label and start of each part of it, in order
    at      seconds, when it was given
    after   the work that it had to wait for
    """

    lane: str
    label: str
    at: float
    after: list[_Given] = field(default_factory=list)
    begun: list[tuple[str, Any]] = field(default_factory=list)
    end: Any = None


class Timing(Observer):
    """Records the beginning and the end of every piece of work from now on. Call `timeline` when all of it is done."""

    def __init__(self, device: Device):
        self._on_cuda, self._overlaps = device.torch_device.type == "cuda", device.overlaps
        self._caller, self._own = threading.get_ident(), threading.local()
        self._given: list[_Given] = []
        self._waits: dict[str, list[_Given]] = {}
        self._last: dict[str, _Given] = {}
        self._events: dict[int, tuple[Any, _Given]] = {}  # the event is kept, so that no other gets its id
        self._at_work: dict[str, _Given] = {}
        with torch.cuda.device(device.torch_device) if self._on_cuda else nullcontext():
            self._zero = self._device_now()
            if self._on_cuda:
                self._zero.synchronize()  # the stream may have work of the caller to do, and times are counted from this event
            self._start = time.perf_counter()

    # ---- what is observed ----------------------------------------------------------------------------------------------

    def begins(self, label: str) -> None:
        self._end_own()
        if label:
            self._begin_own(Lane.CALLER, label)

    def gives(self, lane: str, label: str, work: Work) -> Work:
        if not self._overlaps:
            return work
        given = _Given(lane, label, time.perf_counter(), self._waits.pop(lane, []))
        self._given.append(given)
        self._last[lane] = given
        return functools.partial(self._run, given, work)

    def begins_micro_batch(self, number: int) -> None:
        own, computing = getattr(self._own, "given", None), self._at_work.get(Lane.COMPUTE)
        if own is not None and own.lane == Lane.CALLER:
            own.begun.append((label_of_micro_batch(own.label, number), time.perf_counter()))
        if computing is not None:
            (first, start), *others = computing.begun
            begun = (label_of_micro_batch(computing.label, number), self._device_now())
            computing.begun = [*computing.begun, begun] if others or first != computing.label else [(begun[0], start)]

    def recorded(self, lane: str, event: Any) -> None:
        if event is not None and lane in self._last:
            self._events[id(event)] = event, self._last[lane]

    def waits(self, lane: str, event: Any) -> None:
        if id(event) in self._events:
            self._waits.setdefault(lane, []).append(self._events[id(event)][1])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        own = self._end_own()
        try:
            yield
        finally:
            if own is not None:
                self._begin_own(own.lane, own.begun[-1][0])

    # ---- the host lane --------------------------------------------------------------------------------------------------

    def on_host_lane(self, lane: str, work: Work) -> Work:
        """Wrap work that the caller gives to a lane of the host: the lane does the result instead."""
        own = getattr(self._own, "given", None)
        label, at = own.label if own is not None else "outside of the model", time.perf_counter()

        def timed() -> None:
            self._begin_own(lane, label, at)
            try:
                work()
            finally:
                self._end_own()

        return timed

    def wait_of(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Wrap a wait for the host lane."""

        def waited() -> None:
            with self.waiting():
                wait()

        return waited

    # ---- the clock -----------------------------------------------------------------------------------------------------

    def _run(self, given: _Given, work: Work) -> None:
        given.begun.append((given.label, self._device_now()))
        self._at_work[given.lane] = given
        try:
            work()
        finally:
            del self._at_work[given.lane]
            given.end = self._device_now()

    def _begin_own(self, lane: str, label: str, at: float | None = None) -> None:
        now = time.perf_counter()
        self._own.given = _Given(lane, label, now if at is None else at, begun=[(label, now)])

    def _end_own(self) -> _Given | None:
        """End the work that this thread is doing, and return it."""
        own, self._own.given = getattr(self._own, "given", None), None
        if own is not None:
            own.end = time.perf_counter()
            self._given.append(own)
        return own

    def _device_now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the lane's stream, which is the current one
        return event

    def _seconds(self, time: Any) -> float:
        """Seconds from the start of the timing to a time of the host's clock, or to an event that has happened."""
        return time - self._start if isinstance(time, float) else self._zero.elapsed_time(time) / 1e3

    def timeline(self) -> Timeline:
        """The work that ran since the timing began."""
        end = self._seconds(time.perf_counter())
        lanes: dict[str, list[_Given]] = {}
        for given in self._given:
            if given.end is not None:
                lanes.setdefault(given.lane, []).append(given)
        return Timeline(0.0, end, tuple(span for lane in lanes.values() for span in self._spans(lane)))

    def _spans(self, lane: list[_Given]) -> Iterator[Span]:
        """The spans of a lane, in order."""
        before = 0.0
        for given in sorted(lane, key=lambda given: self._seconds(given.begun[0][1])):
            waited_for = self._waited_for(given, before)
            ends = [*(at for _, at in given.begun[1:]), given.end]
            for (label, start), end in zip(given.begun, ends, strict=True):
                before = self._seconds(end)
                yield Span(given.lane, label, self._seconds(start), before, waited_for)
                waited_for = ""

    def _waited_for(self, given: _Given, before: float) -> str:
        """The label of the last thing that work waited for: an event, or its caller. "" if its lane was busy until then."""
        if given.lane == Lane.CALLER:
            return ""
        latest, label = self._seconds(given.at), f"{Lane.CALLER}: {given.label}"
        for other in given.after:
            if other.end is not None and self._seconds(other.end) > latest:
                latest, label = self._seconds(other.end), other.begun[-1][0]
        return label if latest > before else ""
