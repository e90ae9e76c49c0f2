"""Bytes of device memory that program values hold, counted per storage, for devices without an allocator's figure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from l2l_compile.memory.finalizers import taken


class Ledger:
    """Counts each storage once, however many values are views of it. Safe to use from several lanes.

    `key` maps a storage to a number. Two storages in the same memory have the same number. `give` and `forget` are for
    finalizers: they only note, and every other call clears the notes first.
    """

    def __init__(self, key: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._readers: dict[int, list] = {}
        self._reserved: dict[int, int] = {}  # bytes by storage
        self._held = self.peak = 0
        self._given: deque[int] = deque()  # bytes
        self._forgotten: deque[tuple[int, ...]] = deque()  # keys of storages

    @property
    def held(self) -> int:
        """Bytes that values hold now, besides the reserved ones."""
        return self.all_held - sum(self._reserved.values())

    @property
    def all_held(self) -> int:
        """Bytes that values hold now, and the reserved ones."""
        with self._lock:
            self._clear_notes()
            return self._held

    def _clear_notes(self) -> None:
        """Called with the lock, before anything else. What every node calls looks first whether there are any."""
        for size in taken(self._given):
            self._held -= size
        for keys in taken(self._forgotten):
            for key in keys:
                self._drop(key)

    def start_peak(self) -> None:
        with self._lock:
            self._clear_notes()
            self.peak = self._held

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors, in place of those of the last call, take memory from now on, whether or not a value holds them."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        with self._lock:
            self._clear_notes()
            self._held -= sum(self._reserved.values())
            self._reserved = {self._key(storage): storage.nbytes() for storage in storages}
            self._held += sum(self._reserved.values())
            self.peak = max(self.peak, self._held)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """A program value holds these tensors from now on."""
        with self._lock:
            if self._given or self._forgotten:
                self._clear_notes()
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key = self._key(storage)
                entry = self._readers.get(key)
                if entry is None:
                    size = storage.nbytes() if key not in self._reserved else 0
                    self._readers[key] = [1, size]
                    self._held += size
                else:
                    entry[0] += 1
            self.peak = max(self.peak, self._held)

    def take(self, size: int) -> None:
        """`size` more bytes are held, until `give`."""
        with self._lock:
            self._clear_notes()
            self._held += size
            self.peak = max(self.peak, self._held)

    def give(self, size: int) -> None:
        """`size` bytes are no longer held. A finalizer may call it."""
        self._given.append(size)

    def touch(self, size: int) -> None:
        """`size` more bytes are in use for a moment: they count for the peak alone."""
        with self._lock:
            if self._given or self._forgotten:
                self._clear_notes()
            self.peak = max(self.peak, self._held + size)

    def drop(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A program value no longer holds these tensors. Returns the tensors that no value holds any more."""
        with self._lock:
            if self._given or self._forgotten:
                self._clear_notes()
            return [tensor for tensor in tensors if self._drop(self._key(tensor.untyped_storage()))]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """As `drop`, for a finalizer: the tensors are gone right behind it."""
        self._forgotten.append(tuple(self._key(tensor.untyped_storage()) for tensor in tensors))

    def _drop(self, key: int) -> bool:
        """One value less holds this storage. Returns whether that was the last one."""
        entry = self._readers.get(key)
        if entry is None:
            return False
        entry[0] -= 1
        if entry[0]:
            return False
        self._held -= entry[1]
        del self._readers[key]
        return True

    def clear(self) -> None:
        with self._lock:
            self._clear_notes()
            self._readers.clear()
            self._reserved.clear()
            self._held = 0
