"""A ring of chunks: buffers through which stored tensors pass, one behind the other, while an update computes in one of them.

    free -> reading -> read -> taken by an update -> writing -> free

Chunks are read ahead in the order in which the last step took them, as far as there are free buffers.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from l2l_compile.disk.disk_store import DiskStore
from l2l_compile.disk.disk_threads import Transfer
from l2l_compile.disk.stored_range import StoredSpan
from l2l_compile.memory.pages import huge_pages

_LOOK = 0.2  # seconds


@dataclass(frozen=True)
class Chunk:
    """Spans of stored tensors that are read into one buffer, updated there, and written together."""

    spans: tuple[StoredSpan, ...]

    @property
    def is_alive(self) -> bool:
        """Whether all its tensors are still there."""
        return all(span.range.is_alive for span in self.spans)


class ChunkRing:
    """Buffers of `size` bytes each. One thread takes and gives chunks.

    waited  seconds for which an update has waited for a chunk
    """

    def __init__(self, store: DiskStore, count: int, size: int):
        self._store, self.size, self._count = store, size, count
        self._free: deque[torch.Tensor] | None = None  # made when the first chunk is needed
        self._ahead: dict[Chunk, tuple[torch.Tensor, Transfer]] = {}  # being read, or read
        self._upcoming: deque[Chunk] = deque()
        self._taken: list[Chunk] = []  # in this step
        self._guard = threading.Condition(threading.RLock())
        self.waited = 0.0

    @property
    def bytes(self) -> int:
        """Host memory of the buffers."""
        return self._count * self.size

    def begin(self) -> None:
        """The updates of a step begin: read chunks ahead, in the order of the step before."""
        self.reset()
        with self._guard:
            self._upcoming = deque(self._taken)
            self._taken = []
            self._read_ahead()

    def take(self, chunk: Chunk) -> torch.Tensor:
        """A buffer with the chunk, when it has been read. Raises `DiskError`."""
        start = time.perf_counter()
        self._taken.append(chunk)
        with self._guard:
            found = self._ahead.pop(chunk, None)
        buffer, transfer = found or self._begin_to_read(chunk)
        try:
            transfer.wait()
        except BaseException:
            transfer.settle()
            self._put_back(buffer)
            raise
        finally:
            self.waited += time.perf_counter() - start
        return buffer

    def give(self, chunk: Chunk, buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """Write a chunk that was taken. Its `tensors` stay alive until they are written."""
        held = tuple(tensors)
        self._store.write(chunk.spans, buffer, functools.partial(self._written, buffer, held))

    def drop(self, buffer: torch.Tensor) -> None:
        """Take back the buffer of a chunk that was taken, without writing it."""
        self._put_back(buffer)

    def reset(self) -> None:
        """Read nothing ahead any more: the step is over, or has failed."""
        with self._guard:
            self._upcoming.clear()
        while self._drop_one():
            pass

    def _written(self, buffer: torch.Tensor, held: tuple[torch.Tensor, ...], _: Transfer) -> None:
        self._put_back(buffer)

    def _put_back(self, buffer: torch.Tensor) -> None:
        with self._guard:
            self._buffers().append(buffer)
            self._read_ahead()
            self._guard.notify_all()

    def _buffers(self) -> deque[torch.Tensor]:
        if self._free is None:
            memory = huge_pages(self.bytes, "the ring of the option 'disk'")
            self._free = deque(memory[start : start + self.size] for start in range(0, self.bytes, self.size))
        return self._free

    def _read_ahead(self) -> None:
        """Begin to read the next chunks into free buffers. One buffer is left for a chunk that comes out of order."""
        while self._upcoming and len(self._buffers()) > 1:
            chunk = self._upcoming.popleft()
            if chunk.is_alive:
                buffer = self._buffers().popleft()
                self._ahead[chunk] = buffer, self._store.read(chunk.spans, buffer)

    def _begin_to_read(self, chunk: Chunk) -> tuple[torch.Tensor, Transfer]:
        """Read a chunk that was not read ahead: the first step, or another order than in the step before."""
        while True:
            with self._guard:
                if chunk in self._upcoming:
                    self._upcoming.remove(chunk)
                if self._buffers():
                    buffer = self._buffers().popleft()
                    return buffer, self._store.read(chunk.spans, buffer)
                if not self._ahead:
                    self._guard.wait(_LOOK)  # for a write
                    continue
            self._drop_one()

    def _drop_one(self) -> bool:
        """Drop the chunk that was read ahead last; False if there is none.

        The lock is not held while its read ends: that may wait for a write, whose end takes the lock.
        """
        with self._guard:
            if not self._ahead:
                return False
            _, (buffer, transfer) = self._ahead.popitem()
        transfer.settle()
        with self._guard:
            self._buffers().append(buffer)
        return True
