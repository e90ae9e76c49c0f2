"""Memory of the device for weights that stay until backward: each buffer serves the weights of the same size in the next step.

The first step allocates it. New memory may have belonged to a value that compute still reads, so that a copy into it waits for compute. A
buffer that is there already can be written as soon as its own last reader is done, a whole step ago.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from l2l_compile.devices.device import Device
from l2l_compile.races import Place


class Buffer:
    """Memory for the weights of one segment.

    free   the event after which it may be written, None for at once
    place  is watched for races
    """

    def __init__(self, size: int):
        self.size = size
        self.free: Any = None
        self.place = Place("weights that stay until backward")
        self._memory: torch.Tensor | None = None

    def memory(self, device: Device) -> torch.Tensor:
        """The memory, uint8 (h2d lane)."""
        if self._memory is None:
            self._memory = device.set_apart(self.size)
        return self._memory


class BuffersSetApart:
    """The buffers that no weights are in. A step that is dropped takes its own with it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)

    def take(self, size: int) -> Buffer:
        """A buffer of this size."""
        there = self._free[size]
        return there.pop() if there else Buffer(size)

    def give(self, buffer: Buffer, free: Any) -> None:
        """The weights in a buffer are read for the last time before the event `free`."""
        buffer.free = free
        self._free[buffer.size].append(buffer)

    def clear(self) -> None:
        """Let go of the memory. Called while no lane works."""
        self._free.clear()
