"""Lanes with an action around each piece of their work: a pause, or a wait for the whole device. Also a GPU whose memory is
filled with NaN when it is freed.

An `Around` replaces a lane of a device and passes all calls on to it. `restore` puts the original lanes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from l2l_compile.devices.cuda import CudaDevice
from l2l_compile.devices.device import Device, LaneQueue
from l2l_compile.devices.ledger import Ledger
from l2l_compile.lanes import OF_DEVICE

Work = Callable[[], None]
PAUSE_CYCLES = 2_000_000  # cycles of a GPU: about a millisecond
PAUSE_SECONDS = 0.003  # seconds of a thread


class Around(LaneQueue):
    """Wraps a lane. `inside(work)` runs on it in the place of each piece of work, `after()` after work was queued."""

    def __init__(self, lane: LaneQueue, inside: Callable[[Work], None] | None = None, after: Callable[[], None] | None = None):
        self.lane, self._inside, self._after = lane, inside, after

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the wrapped lane, on a GPU."""
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
    """Put the original lanes back."""
    for name, lane in device.lanes.items():
        device.lanes[name] = lane.lane if isinstance(lane, Around) else lane


def slow_down(device: Device, name: str) -> None:
    """Add a pause on one lane before each piece of its work."""

    def inside(work: Work) -> None:
        pause(device)
        work()

    device.lanes[name] = Around(device.lanes[name], inside)


def pause(device: Device, times: int = 1) -> None:
    """Called on a lane, which then does nothing for a while."""
    if device.torch_device.type == "cuda":
        torch.cuda._sleep(PAUSE_CYCLES * times)
    else:
        time.sleep(PAUSE_SECONDS * times)


def one_after_the_other(device: Device) -> None:
    """Wait after each piece of work until it is done, before the next one is queued on any lane. Then no wait matters."""

    def after() -> None:
        device.synchronize()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)

    for name in OF_DEVICE:
        device.lanes[name] = Around(device.lanes[name], after=after)


class PoisoningCuda(CudaDevice):
    """A GPU whose memory is filled when it is freed, on the compute lane: floats with NaN, integers with -1."""

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
