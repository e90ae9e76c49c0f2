"""A file for the stashes of forwards: one extent for each forward, free again when the last stash in it is gone."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import DiskStore
from l2l_compile.disk.disk_threads import Transfer
from l2l_compile.disk.stored_range import StoredRange, StoredSpan
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.memory.finalizers import taken
from l2l_compile.memory.pages import huge_pages

_BUFFERS = 2  # one is filled while the other one is written
BUFFER_BYTES = _BUFFERS * BLOCK


class FreeExtents:
    """The parts of a file that nobody has. Neighbours are joined: forwards of other shapes take extents of other sizes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def take(self, size: int) -> int | None:
        """Where `size` free bytes begin, in the first part that has them; None if none has."""
        for number, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[number]
                self._starts[number], self._sizes[number] = start + size, free - size
                if free == size:
                    del self._starts[number], self._sizes[number]
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """These bytes are free."""
        number = bisect_left(self._starts, start)
        if number < len(self._starts) and start + size == self._starts[number]:
            size += self._sizes[number]
            del self._starts[number], self._sizes[number]
        if number and self._starts[number - 1] + self._sizes[number - 1] == start:
            self._sizes[number - 1] += size
        else:
            self._starts.insert(number, start)
            self._sizes.insert(number, size)

    def take_last(self, end: int) -> int:
        """Take the free part that ends at `end`, if there is one. Returns where it begins, else `end`."""
        if self._starts and self._starts[-1] + self._sizes[-1] == end:
            self._sizes.pop()
            return self._starts.pop()
        return end


class StashExtent:
    """Bytes of a file for the stashes of one forward, which take them one behind the other (one thread). Whoever has a place holds it."""

    def __init__(self, start: int, size: int):
        self.start, self.size = start, size
        self._used = 0

    def take(self, size: int) -> int:
        """Where the next `size` bytes begin in the file."""
        assert self._used + size <= self.size, "a forward stores more than it has asked for"
        start, self._used = self.start + self._used, self._used + size
        return start


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file: its shape and dtype, its place, and the extent that this is in."""

    shape: torch.Size
    dtype: torch.dtype
    range: StoredRange
    extent: StashExtent

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class StashStore(DiskStore):
    """A file of stashes. It has no name, and no mapping: tensors are written from memory and read into memory.

    `write_tensor` and `read_tensor` are called by one thread each.
    """

    def __init__(self, *folders: str):
        super().__init__(*folders)
        for file in self.file.files:
            file.contents, file.remedy = CONTENTS, REMEDY
        self._extents = FreeExtents()
        self._gone: deque[tuple[int, int]] = deque()  # noted by finalizers
        self._buffers: list[tuple[torch.Tensor, Transfer | None]] = []

    def extent(self, size: int) -> StashExtent:
        """Allocate bytes for the stashes of a forward. Raises `DiskError` if the file system has no room for them."""
        size = whole_pages(size)
        with self.guard:
            for start, freed in taken(self._gone):
                self._extents.give(start, freed)
            found = self._extents.take(size)
            if found is None:
                found = self._extents.take_last(self._used)
                try:
                    self.file.extend(found + size)
                except BaseException:
                    if found < self._used:
                        self._extents.give(found, self._used - found)
                    raise
                self._used = found + size
        made = StashExtent(found, size)
        weakref.finalize(made, self._gone.append, (found, size)).atexit = False
        return made

    def write_tensor(self, tensor: torch.Tensor, extent: StashExtent) -> StoredTensor:
        """Write a tensor of the host. Returns when all of it is on its way; `settle_writes` waits. Raises `DiskError`."""
        self.refuse_in_a_fork()  # which has no buffers either
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = whole_pages(flat.numel())
        stored = StoredTensor(tensor.shape, tensor.dtype, StoredRange(self, extent.take(size), size), extent)
        direct = flat.numel() // PAGE * PAGE if flat.data_ptr() % PAGE == 0 else 0
        if direct:
            self._write_from(flat[:direct], stored, 0, flat)
        for start in range(direct, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            number, buffer = self._next_buffer()
            buffer[: part.numel()].copy_(part)
            transfer = self._write_from(buffer[: whole_pages(part.numel())], stored, start, None)
            self._buffers[number] = buffer, transfer
        return stored

    def _write_from(self, memory: torch.Tensor, stored: StoredTensor, start: int, held: torch.Tensor | None) -> Transfer:
        """Write whole pages of memory to byte `start` of a place. Both stay until it is written."""
        span = StoredSpan(stored.range, start, memory.numel(), 0)
        return self.write([span], memory, functools.partial(_hold, stored, held))

    def _next_buffer(self) -> tuple[int, torch.Tensor]:
        """A buffer for bytes that do not begin on a page, when what was in it before is written, and its number."""
        if not self._buffers:
            memory = huge_pages(BUFFER_BYTES, "stashes on their way to the disk")
            self._buffers = [(memory[number * BLOCK : (number + 1) * BLOCK], None) for number in range(_BUFFERS)]
            self._turn = 0
        self._turn = (self._turn + 1) % _BUFFERS
        buffer, transfer = self._buffers[self._turn]
        if transfer is not None:
            transfer.wait()
        return self._turn, buffer

    def read_into(self, stored: StoredTensor, memory: torch.Tensor) -> Transfer:
        """Read a tensor into memory that begins on a page, and has whole pages. It stays until it is read."""
        span = StoredSpan(stored.range, 0, stored.nbytes, 0)
        return self.read([span], memory, functools.partial(_hold, stored, memory), is_update=False)

    def settle_writes(self, stored: Sequence[StoredTensor]) -> None:
        """Wait until tensors are written. Raises `DiskError`."""
        for each in stored:
            each.range.await_writes()


CONTENTS = "inputs of layers (stash='disk')"
REMEDY = (
    "The step is lost: begin again in a new process, from the last checkpoint if updates run while the device computes, with another "
    "folder as 'disk', or without stash='disk'"
)


def _hold(stored: StoredTensor, memory: torch.Tensor | None, _: Transfer) -> None:
    """Bound to a transfer: the place in the file, and the memory, stay as long as the transfer, also if nobody waits for it."""
