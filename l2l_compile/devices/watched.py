"""A device whose lanes are watched: every event carries the order before it, and races are errors (`races.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from l2l_compile.devices.device import Device, LaneQueue
from l2l_compile.races import Accesses, VectorClock


class _Event:
    """An event of a lane (None if the lane works immediately), and the order of the work that is done when it happens."""

    def __init__(self, event: Any, order: VectorClock):
        self.event, self.order = event, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


class _WatchedLane(LaneQueue):
    """Forwards every call to another lane, and records the order of its work."""

    def __init__(self, name: str, lane: LaneQueue, accesses: Accesses):
        self.name, self.lane, self.accesses = name, lane, accesses

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)

    def run(self, work: Callable[[], None]) -> None:
        self.lane.run(self.accesses.give(self.name, work)[0])

    def record(self) -> _Event:
        order = self.accesses.reached(self.name)  # before the event: work given in between is not in it
        return _Event(self.lane.record(), order)

    def wait(self, event: _Event) -> None:
        if event.event is not None:
            self.lane.wait(event.event)
        self.accesses.hold(self.name, event.order)

    def synchronize(self) -> None:
        order = self.accesses.reached(self.name)
        self.lane.synchronize()
        self.accesses.follow(order)


def watch(device: Device) -> Device:
    """Watch a device from now on, and return it. Called before the device is used."""
    accesses = device.accesses = Accesses()
    device.lanes = {name: _WatchedLane(name, lane, accesses) for name, lane in device.lanes.items()}
    wait = device.wait_on_host

    def wait_on_host(event: _Event) -> None:
        if event.event is not None:
            wait(event.event)
        accesses.follow(event.order)

    device.wait_on_host = wait_on_host  # type: ignore[method-assign]
    device._pool.accesses = accesses
    return device
