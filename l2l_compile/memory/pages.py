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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.memory.address import memory_of
from l2l_compile.memory.finalizers import taken
from l2l_compile.memory.layout import aligned
from l2l_compile.races import UNWATCHED, Place, Unwatched, VectorClock
from l2l_compile.units import format_bytes

_WIDEST = 8  # times the bytes of a tensor: larger buffers are left for larger tensors
_SMALL = 1 << 20  # bytes
_HUGE_PAGE = 2 << 20  # bytes
_HUGE = 16 << 20  # bytes: a page of 2 MiB at its end that is half empty is not much of it
_SLACK = 1.1  # times the most bytes that a step has needed


def pages(size: int, purpose: str) -> torch.Tensor:
    """A uint8 tensor of `size` bytes, filled with zeros, that begins on a page. Raises `L2LError` if there is no memory.

    Large memory asks for huge pages, which are page-locked faster. A system gives them if its setting `shmem_enabled` allows it: the
    memory is shared with processes that are forked, since one that is page-locked and private would be copied in each fork.
    """
    try:
        mapping = mmap.mmap(-1, max(size, 1))
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(mapping, dtype=torch.uint8)[:size]
    except (OSError, MemoryError, ValueError) as error:
        raise _no_memory(size, purpose, error) from error


def huge_pages(size: int, purpose: str) -> torch.Tensor:
    """As `pages`, of this process alone, which a forked one does not have: so the system gives huge pages by its usual setting.

    Not to be page-locked.

    Direct transfers of a disk into huge pages take a sixth of the processor time, and were two to three times as fast.
    """
    if size < _HUGE_PAGE:
        return pages(size, purpose)
    try:
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # else a write copies each page while a forked process lives
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel without them
                    mapping.madvise(getattr(mmap, advice))
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    except (OSError, MemoryError, ValueError) as error:
        raise _no_memory(size, purpose, error) from error
    start = -memory.data_ptr() % _HUGE_PAGE
    return memory[start : start + size]


def _no_memory(size: int, purpose: str, error: Exception) -> L2LError:
    return L2LError(
        f"could not allocate {format_bytes(size)} of host memory for {purpose}: {error}. explain(model, options) lists what uses "
        "it; precision='fp32' needs no wire, update='in_backward' keeps few gradients, a smaller keep_on_host leaves more, and fewer "
        "layers need less of all"
    )


class PinnedMemory:
    """Page-locked memory of a device, up to a budget in bytes (None: no bound).

    lock, unlock   page-lock memory in place: (address, bytes); `lock` raises if the system refuses
    """

    def __init__(self, budget: int | None, lock: Callable[[int, int], None], unlock: Callable[[int], None]):
        self.budget, self._used = budget, 0
        self._lock, self._unlock = lock, unlock
        self._guard = threading.RLock()
        self._given_back: deque[int] = deque()  # bytes, noted by finalizers

    @property
    def used(self) -> int:
        """Bytes that are page-locked now."""
        with self._guard:
            for size in taken(self._given_back):
                self._used -= size
            return self._used

    def has_room(self, size: int) -> bool:
        """Whether `take` would give page-locked memory."""
        return size > 0 and (self.budget is None or self.used + size <= self.budget)

    def take(self, size: int, purpose: str) -> tuple[torch.Tensor, bool]:
        """A uint8 tensor of `size` bytes, and whether it is page-locked: it is unless the budget is used up.

        Raises `L2LError` if the system refuses.
        """
        buffer = pages(size, purpose)
        with self._guard:
            if not self.has_room(size):
                return buffer, False
            self._used += size
        address = buffer.data_ptr()
        try:
            self._lock(address, size)
        except Exception as error:
            self._given_back.append(size)
            raise L2LError(
                f"the system cannot page-lock {format_bytes(size)} for {purpose} ({format_bytes(self.used)} are page-locked "
                f"already): {error}. Lower the option pinned_memory"
            ) from error
        weakref.finalize(buffer.untyped_storage(), self._release, address, size)
        return buffer, True

    def lock_in_place(self, storage: torch.UntypedStorage, address: int, size: int) -> None:
        """Page-lock memory of a storage where it is. Raises if the system refuses. `memory/in_place.py` says when."""
        with self._guard:
            self._used += size
        try:
            self._lock(address, size)
        except Exception:
            self._given_back.append(size)
            raise

    def unlock_in_place(self, address: int, size: int) -> None:
        """Undo `lock_in_place`."""
        self._release(address, size)

    def _release(self, address: int, size: int) -> None:
        """A finalizer of the memory, which is there no longer than this call: it is unlocked at once."""
        self._unlock(address)
        self._given_back.append(size)


def unlocked() -> PinnedMemory:
    """Host memory that is never page-locked."""
    return PinnedMemory(0, lambda address, size: None, lambda address: None)


class Pool:
    """Buffers for tensors from the device, used again for tensors of other shapes, up to eight times smaller than the buffer.

    A buffer is free when its last tensor is gone and every copy out of it is done. A step needs, of each size, the most that it has
    in use at once. Before the pool would hold more than 1.1 times what any step has needed, the buffers that have been free for
    longest go back to the system. So equal steps take no more memory, and texts of different lengths take that of the longest.
    """

    def __init__(self, memory: PinnedMemory, is_done: Callable[[Any], bool] = lambda event: True):
        self._memory, self._is_done = memory, is_done
        self._free: dict[int, list[_Buffer]] = {}  # by size, in the order in which they became free
        self._guard = threading.RLock()
        self._put_back: deque[_Leased] = deque()  # noted by finalizers
        self._leased: dict[int, _Leased] = {}  # by address
        self._in_use: Counter[int] = Counter()  # leases, by size
        self._at_most: Counter[int] = Counter()  # of them at once, since the step began
        self._needed = self._most_needed = 0  # bytes: of this step, and of the step that needed the most
        self._freed = itertools.count()
        self.size = 0
        self.accesses: Unwatched = UNWATCHED

    def begin_step(self) -> None:
        """What is needed is counted anew. A pool for which it is never called keeps what it has taken.

        Buffers that an error has left behind are found here: a signal handler may raise one at any line.
        """
        with self._guard:
            self._take_back()
            for leased in [leased for leased in self._leased.values() if leased() is None]:
                self._make_free(leased)
            leases, free = list(self._leased.values()), itertools.chain.from_iterable(self._free.values())
            self.size = sum(leased.buffer.size for leased in leases if leased.buffer) + sum(buffer.size for buffer in free)
            self._in_use = Counter(leased.needed for leased in leases)
            self._at_most = self._in_use.copy()
            self._needed = sum(size * count for size, count in self._in_use.items())

    def empty(self, shape: torch.Size, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """A tensor in a buffer of its own."""
        size = shape.numel() * dtype.itemsize
        return self.lease(size, purpose).tensor(0, shape, dtype) if size else torch.empty(shape, dtype=dtype)

    def empty_together(self, like: Sequence[torch.Tensor], purpose: str) -> list[torch.Tensor]:
        """Tensors of these shapes and dtypes, in one buffer. It is free when the last of them is gone."""
        starts = [0, *itertools.accumulate(aligned(tensor.nbytes) for tensor in like)]
        lease = self.lease(max(starts.pop(), 1), purpose)
        return [lease.tensor(start, tensor.shape, tensor.dtype) for start, tensor in zip(starts, like, strict=True)]

    def lease(self, size: int, purpose: str) -> Lease:
        """A buffer for several tensors of together `size` bytes, at least one, in whole pages."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._guard:
            self._take_back()
            self._count(size)
            found = self._take_free(size)
            if found is None:
                self._drop_free(int(_SLACK * self._most_needed) - size)
                self.size += size
        if found is None:
            try:
                found = _Buffer(self._memory.take(size, purpose)[0])
            except BaseException:
                with self._guard:
                    self.size -= size
                    self._in_use[size] -= 1
                raise
        if self.accesses.watches:
            done = [event.order for event in found.events if self._is_done(event)]
            self.accesses.write(found.place, knowing=[found.put_back, *done])
        return self._lease(found, size)

    def _count(self, size: int) -> None:
        self._in_use[size] += 1
        if self._in_use[size] > self._at_most[size]:
            self._at_most[size] += 1
            self._needed += size
            self._most_needed = max(self._most_needed, self._needed)

    def _lease(self, buffer: _Buffer, size: int) -> Lease:
        lease = _lease_of_size(size).from_address(buffer.address)
        self._note(lease, buffer, size)
        return lease

    def _note(self, lease: Any, buffer: _Buffer, size: int) -> None:
        """Keep the buffer in use until the lease is gone."""
        lease.buffer, buffer.events = buffer, []
        note = self._put_back_in_order if self.accesses.watches else self._put_back.append
        leased = _Leased(lease, note)
        leased.needed, leased.buffer = size, buffer
        self._leased[buffer.address] = leased

    def reads(self, tensor: torch.Tensor, event: Any) -> None:
        """Note that copies of a tensor, and of others in its buffer, are done when the event has happened.

        Ignored for tensors that are not of this pool, and for those without entries, which lie in no buffer.
        """
        buffer = self._buffer_of(tensor)
        if buffer is not None and event is not None:
            buffer.events.append(event)
            self.accesses.read(buffer.place)

    def small_in_the_heap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in memory of the C library, if it is small and in a buffer of this pool; else the tensor.

        Every buffer is a mapping of its own, of which a process may have 65,530: as many as losses that a long run collects.
        """
        return tensor.clone() if tensor.nbytes < _SMALL and self._buffer_of(tensor) is not None else tensor

    def _buffer_of(self, tensor: torch.Tensor) -> _Buffer | None:
        place = tensor.untyped_storage().data_ptr()
        leased = self._leased.get(place)
        if leased is not None:
            return leased.buffer
        others = [leased.buffer for leased in list(self._leased.values()) if leased.buffer is not None]
        return next((b for b in others if b.address < place < b.address + b.size), None)  # behind a buffer's first tensor

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

    def _put_back_in_order(self, leased: _Leased) -> None:
        """As `_put_back.append`, where accesses are watched."""
        if leased.buffer is not None:
            leased.buffer.put_back = self.accesses.here()
        self._put_back.append(leased)

    def _take_back(self) -> None:
        """Buffers that were put back are free."""
        for leased in taken(self._put_back):
            self._make_free(leased)

    def _make_free(self, leased: _Leased) -> None:
        """Nothing happens if it is done already, or if an error came while the buffer was leased."""
        buffer = leased.buffer
        if buffer is None or self._leased.get(buffer.address) is not leased:
            return
        buffer.since = next(self._freed)
        self._in_use[leased.needed] -= 1
        del self._leased[buffer.address]
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
        self.put_back = VectorClock()
        self.place = Place("a buffer of the host")


class Lease(ctypes.Array):
    """A buffer in use. Its tensors keep the lease alive, and it goes back to the pool when the last of them is gone."""

    _type_, _length_ = ctypes.c_uint8, 0
    buffer: _Buffer

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own, `offset` bytes into the buffer."""
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self, dtype=dtype, count=count, offset=offset)
        return flat if len(shape) == 1 else flat.view(shape)


class _Leased(weakref.ref):
    """Refers to a lease until it is gone. Then its callback notes it.

    A gradient lies in a lease, and PyTorch lets go of it in the middle of `p.grad = None`. Python code that runs there (a
    `__del__`, or a signal handler and another thread, which Python runs between any two steps of a `__del__`) ends the process
    if it reads `p.grad`. So the callback is `deque.append`, which is not Python code.
    """

    buffer: _Buffer | None = None  # set last: a signal handler may raise an error before
    needed = 0  # bytes that were asked for, in whole pages


@functools.cache
def _lease_of_size(size: int) -> type[Lease]:
    return type("Lease", (Lease,), {"_type_": ctypes.c_uint8, "_length_": size})
