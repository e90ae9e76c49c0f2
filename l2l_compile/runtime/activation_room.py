"""How many bytes the option `keep` allows for what forwards keep of their layers.

With "auto" it is found out by measurement. On a device with memory of its own, the first step keeps nothing, and shows how much memory
a step takes. Later steps may keep what is free beside that, less a fifth of the memory, which is left to other code. For a step with
larger sizes than before, more is left. After a step that ran out of memory, later ones keep half as much. Where layers run on the
host, it is half of the memory that is available in the first forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from l2l_compile.devices.device import Device
from l2l_compile.devices.host import available_memory
from l2l_compile.runtime.resident_weights import MeasuredNeed

SPARE = 1 / 5  # of the device's memory
OF_THE_HOST = 1 / 2  # of the host's memory that is available
AUTO = "auto"
_PARTS = 64  # of the device's memory: less of a difference does not change what is kept


class ActivationRoom:
    """The bytes for the steps of one compiled model. `keep` is the option."""

    def __init__(self, device: Device, keep: int | str):
        self._device, self._keep = device, keep
        self._need, self._share = MeasuredNeed(), 1.0
        self._on_host: int | None = None

    def at(self, sizes: Sequence[int]) -> int:
        """Bytes that a step with these sizes may keep."""
        if isinstance(self._keep, int):
            return self._keep
        if self._device.is_host:
            if self._on_host is None:
                self._on_host = int(available_memory() * OF_THE_HOST)
            return self._on_host
        need, memory = self._need.of(sizes), self._device.memory()
        if need is None or memory is None:
            return 0
        part = max(1, memory.total // _PARTS)
        room = self._share * (memory.held + memory.free - need - SPARE * memory.total)
        return max(0, int(room // part * part))

    def measured(self, sizes: Sequence[int], peak: int, kept: int) -> None:
        """A step with these sizes is done. It had `peak` bytes on the device, of which it has kept `kept`."""
        if self._keep == AUTO and not self._device.is_host:
            self._need.measured(sizes, peak - kept, alone=not kept)

    def ran_out(self) -> None:
        """A step that has kept something ran out of memory."""
        self._share /= 2
