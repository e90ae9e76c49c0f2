"""Memory of the device for weights that stay until backward: each buffer serves the weights of the same size in the next run.

The first step allocates it. New memory may have belonged to a value that compute still reads, so that a copy into it waits for compute. A
buffer that is there already can be written at once: it was given back in an earlier run, behind which all lanes were idle.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from l2l_compile.devices.device import Device
from l2l_compile.races import Place


class Buffer:
    """Memory for the weights of one segment. `place` is watched for races."""

    def __init__(self, size: int):
        self.size = size
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
        self._given: list[Buffer] = []  # in this run: its lanes may still read them

    def begin(self) -> None:
        """A run of a graph begins. Called while no lane works."""
        for buffer in self._given:
            self._free[buffer.size].append(buffer)
        self._given = []

    def take(self, size: int) -> Buffer:
        """A buffer of this size."""
        there = self._free[size]
        return there.pop() if there else Buffer(size)

    def give(self, buffer: Buffer) -> None:
        """The weights in a buffer are released."""
        self._given.append(buffer)

    def clear(self) -> None:
        """Let go of the memory. Called while no lane works."""
        self._free.clear()
        self._given = []
