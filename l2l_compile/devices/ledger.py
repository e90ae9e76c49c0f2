"""Bytes of device memory that program values hold, counted per storage, for devices without an allocator's figure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch


class Ledger:
    """Counts each storage once, however many values are views of it. Safe to use from several lanes.

    `key` maps a storage to a number. Two storages in the same memory have the same number.
    """

    def __init__(self, key: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr) -> None:
        self._key = key
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
                storage = tensor.untyped_storage()
                key = self._key(storage)
                entry = self._readers.get(key)
                if entry is None:
                    size = storage.nbytes()
                    self._readers[key] = [1, size]
                    self.held += size
                else:
                    entry[0] += 1
            self.peak = max(self.peak, self.held)

    def take(self, size: int) -> None:
        """`size` more bytes are held, until `give`."""
        with self._lock:
            self.held += size
            self.peak = max(self.peak, self.held)

    def give(self, size: int) -> None:
        """`size` bytes are no longer held."""
        with self._lock:
            self.held -= size

    def touch(self, size: int) -> None:
        """`size` more bytes are in use for a moment: they count for the peak alone."""
        with self._lock:
            self.peak = max(self.peak, self.held + size)

    def drop(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A program value no longer holds these tensors. Returns the tensors that no value holds any more."""
        gone = []
        with self._lock:
            for tensor in tensors:
                key = self._key(tensor.untyped_storage())
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
