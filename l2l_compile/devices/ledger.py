"""Bytes of device memory that program values hold, counted per storage, for devices without an allocator's figure."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..memory.address import memory_of


class Ledger:
    """Counts each storage once, however many values are views of it. Safe to use from several lanes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[int, list] = {}
        self.held = self.peak = 0

    def start_peak(self) -> None:
        with self._lock:
            self.peak = self.held

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """A program value holds these tensors from now on."""
        with self._lock:
            for tensor in tensors:
                entry = self._readers.setdefault(memory_of(tensor), [0, 0])
                entry[0] += 1
                if entry[0] == 1:
                    entry[1] = tensor.untyped_storage().nbytes()
                    self.held += entry[1]
            self.peak = max(self.peak, self.held)

    def take(self, size: int) -> None:
        """So many bytes more are held, until `give`."""
        with self._lock:
            self.held += size
            self.peak = max(self.peak, self.held)

    def give(self, size: int) -> None:
        """So many bytes are not held any more."""
        with self._lock:
            self.held -= size

    def touch(self, size: int) -> None:
        """So many bytes more are in use for a moment."""
        with self._lock:
            self.peak = max(self.peak, self.held + size)

    def drop(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A program value lets go of these tensors; those that nobody holds any more."""
        gone = []
        with self._lock:
            for tensor in tensors:
                key = memory_of(tensor)
                entry = self._readers.get(key)
                if entry is None:
                    continue
                entry[0] -= 1
                if entry[0] == 0:
                    self.held -= entry[1]
                    del self._readers[key]
                    gone.append(tensor)
        return gone

    def clear(self) -> None:
        with self._lock:
            self._readers.clear()
            self.held = 0
