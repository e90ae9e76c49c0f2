"""A device whose lanes are observed for a while: an observer is told the node, the beginning and the end of each piece of work.

Observed lanes forward every call. After `observe`, the device has its plain lanes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import fx

from l2l_compile.devices.device import Device, LaneQueue
from l2l_compile.devices.labels import label_of
from l2l_compile.ir.segments import Segment

Work = Callable[[], None]


class Observer:
    """The callbacks of an observer. This base class records nothing."""

    def begins(self, label: str) -> None:
        """The caller begins another node of a program; the label is "" for none (caller)."""

    def gives(self, lane: str, label: str, work: Work) -> Work:
        """A lane receives work. Returns the work that the lane does instead (caller)."""
        return work

    def begins_micro_batch(self, number: int) -> None:
        """The compute lane begins a micro-batch, counted from 0 (compute lane)."""

    def recorded(self, lane: str, event: Any) -> None:
        """An event of a lane was made."""

    def waits(self, lane: str, event: Any) -> None:
        """Work that a lane receives from now on starts after an event."""

    def waiting(self) -> AbstractContextManager:
        """Context manager in which a thread waits."""
        return nullcontext()


class _ObservedLane(LaneQueue):
    """Forwards every call to another lane, and tells the observer."""

    def __init__(self, name: str, lane: LaneQueue, observer: Observer, labels: _Labels):
        self.name, self.lane, self._observer, self._labels = name, lane, observer, labels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)

    def run(self, work: Work) -> None:
        self.lane.run(self._observer.gives(self.name, self._labels.node, work))

    def record(self) -> Any:
        event = self.lane.record()
        self._observer.recorded(self.name, event)
        return event

    def wait(self, event: Any) -> None:
        self._observer.waits(self.name, event)
        self.lane.wait(event)

    def synchronize(self) -> None:
        with self._observer.waiting():
            self.lane.synchronize()


class _Labels:
    """The label of the node that the caller runs."""

    node = ""


@contextmanager
def observe(device: Device, observer: Observer) -> Iterator[None]:
    """Context manager in which the observer is told of all work that the device receives. The device must be idle at its end."""
    labels, lanes = _Labels(), device.lanes
    begins, begins_micro_batch, wait, synchronize = (getattr(device, name) for name in _REPLACED)

    def observed_begins(node: fx.Node, segments: Sequence[Segment]) -> None:
        labels.node = label_of(node, segments)
        observer.begins(labels.node)
        begins(node, segments)

    def observed_micro_batch(number: int) -> None:
        observer.begins_micro_batch(number)
        begins_micro_batch(number)

    def observed_wait(event: Any) -> None:
        with observer.waiting():
            wait(event)

    def observed_synchronize() -> None:
        labels.node = ""
        observer.begins("")
        synchronize()

    before = {name: vars(device)[name] for name in _REPLACED if name in vars(device)}
    replaced = (observed_begins, observed_micro_batch, observed_wait, observed_synchronize)
    vars(device).update(zip(_REPLACED, replaced, strict=True))
    device.lanes = {name: _ObservedLane(name, lane, observer, labels) for name, lane in lanes.items()}
    try:
        yield
    finally:
        device.lanes = lanes
        for name in _REPLACED:
            del vars(device)[name]
        vars(device).update(before)


_REPLACED = ("begins", "begins_micro_batch", "wait_on_host", "synchronize")
