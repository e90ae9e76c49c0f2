"""Tensors in a file: the range of each, and the threads that read it. Files that are written as well have a `DiskStore`."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.disk_threads import DiskBlock, DiskThreads, Transfer
from l2l_compile.disk.mapped_parts import Addresses
from l2l_compile.errors import DiskError, L2LError, RankError

THREADS = 2  # each way, of each folder
STORED = "_l2l_stored"  # an attribute of storages: it is gone with the storage


class StoredRange:
    """The place of one tensor in the file of a store.

    start, size  in bytes, whole pages: `start` of the place in the file
    writes       transfers into the range that are under way, with the bytes that they write: from, to
    sources      what each of them writes from: spans, and the buffer that they are in
    memory       to which the range is mapped: it stays as long as the range
    shift        bytes of the range before those of the tensor
    is_in_place  whether nothing but reads goes to the file: what is written into the tensor stays in memory
    """

    is_in_place = False
    shift = 0
    _some_were_made = False

    def __init__(self, store: ReadableStore, start: int, size: int):
        self.store, self.start, self.size = store, start, size
        self.memory: Addresses | None = None
        self.writes: dict[Transfer, tuple[int, int]] = {}
        self.sources: dict[Transfer, tuple[Sequence[StoredSpan], torch.Tensor]] = {}
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self._address = 0

    @property
    def is_alive(self) -> bool:
        """Whether a tensor is still there."""
        return self._storage is not None and self._storage() is not None

    def read(self, buffer: memoryview, start: int) -> None:
        """Read the newest bytes from `start` on into a buffer of whole pages (any thread). Raises `DiskError`."""
        self.store.file.read(buffer, self.start + start)

    def write(self, buffer: memoryview, start: int) -> None:
        """Write a buffer of whole pages, whose first byte is byte `start` (disk threads). Raises `DiskError`."""
        self.store.write_block(buffer, self.start + start)

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Bytes from `start` on in transfers: as `ReadableFile.blocks`."""
        return self.store.file.blocks(self.start + start, size)

    def bytes_to_read(self, start: int, size: int) -> int:
        """Bytes, of whole pages from `start` on, that are read from a disk."""
        return size

    def landed(self, start: int, size: int) -> None:
        """A write of `size` bytes from `start` on is done: they are the newest (a disk thread)."""

    @property
    def own_places(self) -> Sequence[int]:
        """Where places of `size` bytes begin that are free when the tensor is gone."""
        return (self.start,)

    def hold(self, tensor: torch.Tensor, freed: deque[tuple[Sequence[int], int]]) -> None:
        """Belong to the storage of a tensor. `freed` gets a note when the storage is gone."""
        self._belong_to(tensor.untyped_storage())
        weakref.finalize(tensor.untyped_storage(), freed.append, (self.own_places, self.size)).atexit = False

    def _belong_to(self, storage: torch.UntypedStorage) -> None:
        StoredRange._some_were_made = True
        setattr(storage, STORED, self)
        self._storage, self._address = weakref.ref(storage), storage.data_ptr()

    def is_at(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage still is where it was mapped: `share_memory_()` moves the bytes of a storage to other memory."""
        return storage.data_ptr() == self._address

    def await_writes(self, start: int = 0, end: int | None = None) -> None:
        """Wait for the writes under way into bytes `start` to `end` of the range. Raises `DiskError` if the disk has failed."""
        end = self.size if end is None else end
        for transfer, (first, last) in self.writes.copy().items():  # a copy is one step, and disk threads take entries out
            if first < end and start < last:
                transfer.wait()
        self.store.check()

    def bytes_in_flight(self, start: int, size: int) -> torch.Tensor | None:
        """A copy of bytes, from `start` on, that a write under way brings to the disk; None if no write brings all of them (any thread)."""
        for transfer, (spans, buffer) in self.sources.copy().items():
            for span in spans:
                if span.range is self and span.start <= start and start + size <= span.start + whole_pages(span.size):
                    at = span.at + start - span.start
                    found = buffer[at : at + size].clone()
                    if transfer in self.sources:  # the buffer is used again behind the end of the write
                        return found
        return None


def some_are_stored() -> bool:
    """Whether any tensor of this process may be in a file: else nobody has to look at each."""
    return StoredRange._some_were_made


@dataclass(frozen=True)
class StoredSpan:
    """Bytes of a stored tensor and their place in a buffer: `size` bytes from byte `start` of the tensor, at byte `at` of the buffer."""

    range: StoredRange
    start: int
    size: int
    at: int


class ReadableFile(Protocol):
    """What a store reads from. Offsets and sizes are multiples of a page."""

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer, as far as the file reaches. Raises `DiskError`."""

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Bytes in transfers: the number of the queue of each, which byte is the first, and how many."""


class ReadableStore:
    """A file with tensors, and the threads that read it. One that is written as well is a `DiskStore`.

    `failed` is called with the error of the first transfer that fails (a disk thread).

    guard       the lock on what is said of the file
    read_bytes  bytes that transfers have read so far
    """

    file: ReadableFile

    def __init__(self, readers: DiskThreads, failed: Callable[[DiskError], object] = lambda _: None):
        self._readers, self._failed = readers, failed
        self.guard = threading.RLock()
        self._failure: L2LError | None = None  # a new one: that of the transfer keeps its traceback alive, and with it the model
        self.read_bytes = 0

    def _note(self, transfer: Transfer, spans: Sequence[StoredSpan]) -> None:
        is_interrupt = self._readers.is_in_a_fork and not isinstance(
            transfer.error, Exception
        )  # of a read on the user's own thread
        if transfer.error is not None and not is_interrupt:
            for store in (self, *(span.range.store for span in spans)):
                store._fail(_anew(transfer.error))

    def _fail(self, error: L2LError) -> None:
        with self.guard:
            is_first, self._failure = self._failure is None, self._failure or error
        if is_first and isinstance(error, DiskError) and not self._readers.is_in_a_fork:  # the parent goes on
            self._failed(error)

    def check(self) -> None:
        """Raise the `DiskError` of the first transfer that failed: a step was made in part, and nothing is right any more.

        If the commit of another rank did not come, it is a `RankError`.
        """
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def count_read(self, size: int) -> None:
        """Count bytes that are read (any thread)."""
        with self.guard:
            self.read_bytes += size

    def read(
        self,
        spans: Sequence[StoredSpan],
        buffer: torch.Tensor,
        then: Callable[[Transfer], None] = lambda _: None,
        *,
        is_update: bool = True,
    ) -> Transfer:
        """Read spans into a buffer that begins on a page, behind writes into them that are under way.

        Bytes that are read for an update count as `read_bytes`. Other reads come first: compute waits for them. Who asks counts them.
        They may be spans of another store: of a model that was compiled twice, or shares parameters with another model.
        """

        def block(span: StoredSpan, offset: int, size: int) -> None:
            span.range.await_writes(span.start + offset, span.start + offset + size)
            span.range.read(memory_at(buffer, span.at + offset, size), span.start + offset)

        def done(transfer: Transfer) -> None:
            self._note(transfer, spans)
            then(transfer)

        if is_update:
            self.count_read(sum(whole_pages(span.size) for span in spans))
        return self._readers.submit(blocks_of(spans, block), then=done, is_urgent=not is_update)

    def write(
        self, spans: Sequence[StoredSpan], buffer: torch.Tensor, then: Callable[[Transfer], None] = lambda _: None
    ) -> Transfer:
        """Write spans from a buffer that begins on a page. From now on, `await_writes` of their ranges waits."""
        self._refuse_writes()

    def write_block(self, buffer: memoryview, start: int) -> None:
        """Write a buffer of whole pages (disk threads). Raises `DiskError`."""
        self._refuse_writes()

    def before_writes(self) -> Callable[[], None]:
        """What each block of a write calls first that is given now (disk threads)."""
        self._refuse_writes()

    def _refuse_writes(self) -> NoReturn:
        raise AssertionError("a write into files that are only read")


def reader_threads(queues: int) -> DiskThreads:
    """Threads that read, some for each queue."""
    return DiskThreads(THREADS, "disk-read", queues)


def blocks_of(spans: Sequence[StoredSpan], block: Callable[[StoredSpan, int, int], None]) -> list[DiskBlock]:
    """`block(span, offset, bytes)` for every block of every span, in the queue of its folder."""
    return [
        DiskBlock(functools.partial(block, span, offset, size), folder)
        for span in spans
        for folder, offset, size in span.range.blocks(span.start, whole_pages(span.size))
    ]


def memory_at(buffer: torch.Tensor, start: int, size: int) -> memoryview:
    assert start + size <= buffer.numel(), "a span ends behind its buffer"
    return memoryview((ctypes.c_uint8 * size).from_address(buffer.data_ptr() + start)).cast("B")


def _anew(error: BaseException) -> L2LError:
    """The error that a store raises behind one of a transfer."""
    if isinstance(error, (DiskError, RankError)):
        return type(error)(str(error))
    return DiskError(f"a transfer failed: {type(error).__name__}: {error}")
