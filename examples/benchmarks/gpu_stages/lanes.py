"""Lanes with something around each piece of their work: a pause, a wait for the whole device; memory that is filled with NaN when
it is freed.

A lane of a device is replaced by an `Around`, which hands everything on to it; `restore` puts the lanes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from l2l_compile.devices.cuda import CudaDevice
from l2l_compile.devices.device import LANES, Device, Lane
from l2l_compile.devices.ledger import Ledger

Work = Callable[[], None]
PAUSE_CYCLES = 2_000_000  # of a GPU: about a millisecond
PAUSE_SECONDS = 0.003  # of a thread


class Around(Lane):
    """Another lane. `inside` runs on it in the place of each piece of work, which it is given; `after` when work was queued."""

    def __init__(self, lane: Lane, inside: Callable[[Work], None] | None = None, after: Callable[[], None] | None = None):
        self.lane, self._inside, self._after = lane, inside, after

    @property
    def stream(self) -> torch.cuda.Stream:
        """That of a lane of a GPU."""
        return self.lane.stream

    def run(self, work: Work) -> None:
        self.lane.run(work if self._inside is None else lambda: self._inside(work))
        if self._after is not None:
            self._after()

    def record(self) -> Any:
        return self.lane.record()

    def wait(self, event: Any) -> None:
        self.lane.wait(event)

    def synchronize(self) -> None:
        self.lane.synchronize()


def restore(device: Device) -> None:
    """The lanes as they were."""
    for name, lane in device.lanes.items():
        device.lanes[name] = lane.lane if isinstance(lane, Around) else lane


def slow_down(device: Device, name: str) -> None:
    """A pause on one lane before each piece of its work."""

    def inside(work: Work) -> None:
        pause(device)
        work()

    device.lanes[name] = Around(device.lanes[name], inside)


def pause(device: Device, times: int = 1) -> None:
    """Called on a lane: it does nothing for a while."""
    if device.torch_device.type == "cuda":
        torch.cuda._sleep(PAUSE_CYCLES * times)
    else:
        time.sleep(PAUSE_SECONDS * times)


def one_after_the_other(device: Device) -> None:
    """Every piece of work is done before the next is given to any lane: no order of waits matters."""

    def after() -> None:
        device.synchronize()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)

    for name in LANES:
        device.lanes[name] = Around(device.lanes[name], after=after)


class PoisoningCuda(CudaDevice):
    """A GPU whose freed memory is filled on the compute lane, where it is freed: with NaN, in integers with -1."""

    def __init__(self, device: torch.device, pinned_memory: int | None = None):
        super().__init__(device, pinned_memory)
        self._held = Ledger()

    def reserve_slabs(self, count: int, size: int) -> None:
        if count == 0:
            self._held.clear()
        super().reserve_slabs(count, size)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held.hold(tensors)

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self.lanes["compute"].stream):
            for tensor in self._held.drop(tensors):
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                whole.fill_(255)
