"""How many bytes the options `keep` and `keep_on_host` allow for what forwards keep of their layers.

With keep="auto" it is found out by measurement. On a device with memory of its own, the first step keeps nothing, and shows how much
memory a step takes. Later steps may keep what is free beside that, less a fifth of the memory, which is left to other code. For a step
with larger sizes than before, more is left. After a step that ran out of memory, later ones keep half as much. Where layers run on the
host, it is half of the memory that is available in the first forward.

With keep_on_host="auto", the first steps keep nothing on the host, and show how long forward and backward take, and what they copy. What
the link could have copied besides, in nine tenths of that time, is kept from then on, within half of the host's available memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from l2l_compile.devices.device import Device, LinkRates
from l2l_compile.options import AUTO
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.resident_weights import MeasuredNeed
from l2l_compile.runtime.stats import Stats

SPARE = 1 / 5  # of the device's memory
OF_THE_HOST = 1 / 2  # of the host's memory that is available
OF_THE_LINK = 9 / 10  # of the bytes that it carries while the device computes: with more, compute begins to wait
_PARTS = 64  # of the memory: less of a difference does not change what is kept
STEPS = 3  # until the link is known: a first step compiles, and so does the one after it with keep="auto"
_SHORTER = 2 / 3  # of its seconds that a backward still takes if it recomputes nothing


@dataclass(frozen=True)
class Traffic:
    """Seconds of a forward and of a backward, and the bytes that both copy to the host, and backward to the device."""

    forward_seconds: float
    backward_seconds: float
    to_device: int
    to_host: int

    def room(self, rates: LinkRates) -> int:
        """Bytes that the link could carry to the host in forward, and back in backward, beside the other copies."""
        out = OF_THE_LINK * rates.d2h * self.forward_seconds - self.to_host
        back = OF_THE_LINK * rates.h2d * self.backward_seconds * _SHORTER - self.to_device
        return max(0, int(min(out, back)))


def room_on_host(carried: float, available: int) -> int:
    """Bytes that a step keeps on the host, given those that the link carries, and the memory that is available."""
    part = max(1, available // _PARTS)
    return int(min(carried, available * OF_THE_HOST) // part * part)


class ActivationRoom:
    """The bytes for the steps of one compiled model. `keep` and `keep_on_host` are the options."""

    def __init__(self, device: Device, keep: int | str, keep_on_host: int | str = 0):
        self._device, self._keep, self._keep_on_host = device, keep, keep_on_host
        self._need, self._share = MeasuredNeed(), 1.0
        self._on_host: int | None = None
        self._steps, self._fastest, self._link = 0, math.inf, 0.0  # bytes on the host for each unit of the sizes' product
        self._available: int | None = None

    def at(self, sizes: Sequence[int]) -> Room:
        """Bytes that a step with these sizes may keep."""
        return Room(self._of_device(sizes), self._of_host(sizes))

    def _of_device(self, sizes: Sequence[int]) -> int:
        if isinstance(self._keep, int):
            return self._keep
        if self._device.is_host:
            if self._on_host is None:
                self._on_host = int(self._device.host_memory_available() * OF_THE_HOST)
            return self._on_host
        need, memory = self._need.of(sizes), self._device.memory()
        if need is None or memory is None:
            return 0
        part = max(1, memory.total // _PARTS)
        room = self._share * (memory.held + memory.free - need - SPARE * memory.total)
        return max(0, int(room // part * part))

    def _of_host(self, sizes: Sequence[int]) -> int:
        if isinstance(self._keep_on_host, int):
            return self._keep_on_host
        if self._steps < STEPS:
            return 0
        if self._available is None:  # once: what is kept there later is not available any more
            self._available = self._device.host_memory_available()
        return room_on_host(self._link * math.prod(sizes), self._available)

    def measured(self, sizes: Sequence[int], stats: Stats, kept: Room) -> None:
        """A step with these sizes is done. It has kept `kept`, of which the device's part is in its peak."""
        if self._keep == AUTO and not self._device.is_host:
            self._need.measured(sizes, stats.peak_device_bytes - kept.device, alone=not kept.device)
        if self._keep_on_host == AUTO and self._steps < STEPS:
            self._measure_link(math.prod(sizes), stats)

    def _measure_link(self, size: int, stats: Stats) -> None:
        """Of the first steps, which may have compiled something, the fastest for its size counts."""
        self._steps += 1
        seconds, rates = stats.seconds / max(1, size), self._device.link_rates()
        if rates is None or seconds >= self._fastest:
            return
        in_backward = stats.fetched_bytes // 2 + stats.restored_bytes  # weights are fetched in forward as well
        traffic = Traffic(stats.forward_seconds, stats.backward_seconds, in_backward, stats.offloaded_bytes)
        self._fastest, self._link = seconds, traffic.room(rates) / max(1, size)

    def ran_out(self) -> None:
        """A step that has kept something ran out of memory."""
        self._share /= 2
