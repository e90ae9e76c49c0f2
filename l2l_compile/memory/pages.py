"""Host memory in whole pages: where it comes from, and how much of it is page-locked for a device.

Buffers are mapped from the system one by one and go back to it when their last tensor is gone. So they do not fragment
the heap of the C library, and are not rounded up to powers of two as buffers of PyTorch's pinned allocator are. For a
device that copies asynchronously from host memory, they are page-locked in place.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import L2LError
from ..units import format_bytes
from .accesses import UNWATCHED, Order, Place, Unwatched
from .address import memory_of

_WIDEST = 8  # times the bytes of a tensor: larger buffers are left for larger tensors
_SLACK = 1.1  # times the most bytes that were needed at once


def pages(size: int, purpose: str) -> torch.Tensor:
    """A uint8 tensor of `size` bytes, filled with zeros, that begins on a page. Raises `L2LError` if there is no memory."""
    try:
        return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
    except (OSError, MemoryError, ValueError) as error:
        raise L2LError(
            f"the host has no {format_bytes(size)} for {purpose}: {error}. explain(model, options) shows what needs how much; "
            "precision='fp32' has no wire, update='in_backward' keeps few gradients, fewer layers need less of all"
        ) from error


class PinnedMemory:
    """Page-locked memory of a device, up to a budget in bytes (None: no bound).

    lock, unlock   page-lock memory in place: (address, bytes); `lock` raises if the system refuses
    """

    def __init__(self, budget: int | None, lock: Callable[[int, int], None], unlock: Callable[[int], None]):
        self.budget, self.used = budget, 0
        self._lock, self._unlock = lock, unlock
        self._guard = threading.RLock()  # a buffer may be given back at any moment, by the garbage collector

    def has_room(self, size: int) -> bool:
        """Whether `take` would give page-locked memory."""
        with self._guard:
            return size > 0 and (self.budget is None or self.used + size <= self.budget)

    def take(self, size: int, purpose: str) -> tuple[torch.Tensor, bool]:
        """A uint8 tensor of `size` bytes, and whether it is page-locked: it is unless the budget is used up.

        Raises `L2LError` if the system refuses.
        """
        buffer = pages(size, purpose)
        with self._guard:
            if not self.has_room(size):
                return buffer, False
            self.used += size
        address = buffer.data_ptr()
        try:
            self._lock(address, size)
        except Exception as error:
            self._give_back(size)
            raise L2LError(
                f"the system cannot page-lock {format_bytes(size)} for {purpose} ({format_bytes(self.used)} are page-locked "
                f"already): {error}. Lower the option pinned_memory"
            ) from error
        weakref.finalize(buffer.untyped_storage(), self._release, address, size)
        return buffer, True

    def _release(self, address: int, size: int) -> None:
        self._unlock(address)
        self._give_back(size)

    def _give_back(self, size: int) -> None:
        with self._guard:
            self.used -= size


def unlocked() -> PinnedMemory:
    """Host memory that is never page-locked."""
    return PinnedMemory(0, lambda address, size: None, lambda address: None)


class Pool:
    """Buffers for tensors from the device, used again for tensors of other shapes, up to eight times smaller than the buffer.

    A buffer is free when its last tensor is gone and every copy out of it is done. Before the pool would hold more than 1.1
    times the most bytes that were needed at once, the buffers that have been free for longest go back to the system. So
    batches of texts of different lengths take the memory of the longest.
    """

    def __init__(self, memory: PinnedMemory, is_done: Callable[[Any], bool] = lambda event: True):
        self._memory, self._is_done = memory, is_done
        self._free: dict[int, list[_Buffer]] = {}  # by size, in the order in which they became free
        self._guard = threading.RLock()  # a buffer may be given back at any moment, by the garbage collector
        self._leased: dict[int, _Buffer] = {}  # by address
        self._needed = self._most_needed = 0  # bytes that were asked for and are in use: now, and at most
        self._put_backs = itertools.count()
        self.size = 0
        self.accesses: Unwatched = UNWATCHED

    def empty(self, shape: torch.Size, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """A tensor in a buffer of its own."""
        size = shape.numel() * dtype.itemsize
        return self.lease(size, purpose).tensor(0, shape, dtype) if size else torch.empty(shape, dtype=dtype)

    def lease(self, size: int, purpose: str) -> Lease:
        """A buffer for several tensors of together `size` bytes, at least one."""
        with self._guard:
            self._needed += size
            self._most_needed = max(self._most_needed, self._needed)
            found = self._take_free(size)
            if found is None:
                self._drop_free(int(_SLACK * self._most_needed) - size)
                self.size += size
        if found is None:
            try:
                found = _Buffer(self._memory.take(size, purpose)[0])
            except BaseException:
                with self._guard:
                    self.size, self._needed = self.size - size, self._needed - size
                raise
        if self.accesses.watches:
            done = [event.order for event in found.events if self._is_done(event)]
            self.accesses.write(found.place, knowing=[found.put_back, *done])
        return self._lease(found, size)

    def _lease(self, buffer: _Buffer, size: int) -> Lease:
        self._leased[buffer.address] = buffer
        return Lease.of(buffer, size, self)

    def reads(self, tensor: torch.Tensor, event: Any) -> None:
        """Note that a copy of a tensor is done when the event has happened. Ignored for tensors that are not of this pool."""
        buffer = self._buffer_of(tensor)
        if buffer is not None and event is not None:
            buffer.events.append(event)
            self.accesses.read(buffer.place)

    def _buffer_of(self, tensor: torch.Tensor) -> _Buffer | None:
        return self._leased.get(tensor.untyped_storage().data_ptr())

    def _take_free(self, size: int) -> _Buffer | None:
        """The smallest free buffer of at least this size, and at most eight times as large; None if there is none."""
        found = self._take_of_size(size)
        if found is None:
            larger = sorted(s for s in self._free if size < s <= _WIDEST * size)
            found = next(filter(None, map(self._take_of_size, larger)), None)
        return found

    def _take_of_size(self, size: int) -> _Buffer | None:
        for buffer in self._free.get(size, ()):
            if self._is_free(buffer):
                self._remove(buffer)
                return buffer
        return None

    def _drop_free(self, bound: int) -> None:
        """Give free buffers back to the system until the pool holds no more than `bound` bytes."""
        waiting = (
            sorted((b for buffers in self._free.values() for b in buffers), key=lambda b: b.since) if self.size > bound else []
        )
        for buffer in waiting:
            if self.size <= bound:
                return
            if self._is_free(buffer):
                self._remove(buffer)
                self.size -= buffer.size

    def _is_free(self, buffer: _Buffer) -> bool:
        return not buffer.events or all(map(self._is_done, buffer.events))

    def _remove(self, buffer: _Buffer) -> None:
        free = self._free[buffer.size]
        free.remove(buffer)
        if not free:
            del self._free[buffer.size]

    def _put_back(self, buffer: _Buffer, needed: int) -> None:
        with self._guard:
            buffer.since = next(self._put_backs)
            self._needed -= needed
            if self.accesses.watches:
                buffer.put_back = self.accesses.here()
            self._leased.pop(buffer.address, None)
            self._free.setdefault(buffer.size, []).append(buffer)


class _Buffer:
    """Memory of the pool.

    size      in bytes; `address` is where it begins
    events    copies out of it, or into it, that were begun
    since     when it was put back: a counter
    put_back  the order of the work that was done then
    """

    def __init__(self, memory: torch.Tensor):
        self.memory, self.size, self.address = memory, memory.numel(), memory_of(memory)
        self.events: list[Any] = []
        self.since = 0
        self.put_back = Order()
        self.place = Place("a buffer of the host")


class Lease(ctypes.Array):
    """A buffer in use. Its tensors keep the lease alive, and it goes back to the pool when the last of them is gone."""

    _type_, _length_ = ctypes.c_uint8, 0
    buffer: _Buffer
    needed: int
    pool: Pool

    @staticmethod
    def of(buffer: _Buffer, needed: int, pool: Pool) -> Lease:
        lease = _lease_of_size(needed).from_address(buffer.address)
        buffer.events = []
        lease.buffer, lease.needed, lease.pool = buffer, needed, pool
        return lease

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own, `offset` bytes into the buffer."""
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self, dtype=dtype, count=count, offset=offset).view(shape)

    def __del__(self) -> None:
        if (pool := getattr(self, "pool", None)) is not None:
            pool._put_back(self.buffer, self.needed)


@functools.cache
def _lease_of_size(size: int) -> type[Lease]:
    return type("Lease", (Lease,), {"_type_": ctypes.c_uint8, "_length_": size})
