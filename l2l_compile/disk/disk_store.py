"""Tensors in a file. Each is an ordinary tensor over a mapping of its own, and moves by transfers that pass the mapping by.

    reader of the tensor    the mapping: `state_dict()`, `torch.save` and a user's own code work as ever, at the disk's speed
    update                  read(spans, buffer) -> compute in the buffer -> write(spans, buffer)

Between an update and the end of its write, the mapping has old bytes: every reader of this package calls `await_writes` before.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.disk.disk_file import DiskFile, whole_pages
from l2l_compile.disk.disk_threads import DiskThreads, Transfer
from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import taken
from l2l_compile.ranks.sharded import is_sharded

BLOCK = 8 << 20  # bytes of one transfer: with smaller ones, a disk is as fast, and the processor busier
_THREADS = 2  # each way
_STORED = "_l2l_stored"  # an attribute of storages: it is gone with the storage


class StoredRange:
    """The place of one tensor in the file of a store.

    start, size  in bytes, whole pages: `start` of the place in the file
    writes       transfers into the range that are under way, with the bytes that they write: from, to
    sources      what each of them writes from: spans, and the buffer that they are in
    """

    def __init__(self, store: DiskStore, start: int, size: int):
        self.store, self.start, self.size = store, start, size
        self.writes: dict[Transfer, tuple[int, int]] = {}
        self.sources: dict[Transfer, tuple[Sequence[StoredSpan], torch.Tensor]] = {}
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self._address = 0

    @property
    def is_alive(self) -> bool:
        """Whether a tensor is still there."""
        return self._storage is not None and self._storage() is not None

    def pieces(self, start: int, size: int) -> list[tuple[int, int]]:
        """Where in the file the newest bytes from `start` on are: offsets in the file, and bytes (any thread)."""
        return [(self.start + start, size)]

    def offset_to_write(self, start: int) -> int:
        """Where in the file byte `start` is written (disk threads)."""
        return self.start + start

    def landed(self, start: int, size: int) -> None:
        """A write of `size` bytes from `start` on is done: they are the newest (a disk thread)."""

    @property
    def own_places(self) -> Sequence[int]:
        """Where places of `size` bytes begin that are free when the tensor is gone."""
        return (self.start,)

    def hold(self, tensor: torch.Tensor, freed: deque[tuple[Sequence[int], int]]) -> None:
        """Belong to the storage of a tensor. `freed` gets a note when the storage is gone."""
        storage = tensor.untyped_storage()
        setattr(storage, _STORED, self)
        self._storage, self._address = weakref.ref(storage), storage.data_ptr()
        weakref.finalize(storage, freed.append, (self.own_places, self.size)).atexit = False

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


@dataclass(frozen=True)
class StoredSpan:
    """Bytes of a stored tensor and their place in a buffer: `size` bytes from byte `start` of the tensor, at byte `at` of the buffer."""

    range: StoredRange
    start: int
    size: int
    at: int


class DiskStore:
    """A file of tensors in a folder, and the threads that read and write it.

    `failed` is called with the error of the first transfer that fails (a disk thread).

    guard                      the lock on what is said of the file
    read_bytes, written_bytes  bytes that transfers have moved so far
    """

    def __init__(self, folder: str, name: str | None = None, failed: Callable[[DiskError], object] = lambda _: None):
        self._failed = failed
        self.file = DiskFile(folder) if name is None else DiskFile(folder, name)
        self.file.probe()
        self._readers, self._writers = DiskThreads(_THREADS, "disk-read"), DiskThreads(_THREADS, "disk-write")
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size, where ranges of tensors that are gone begin
        self._freed: deque[tuple[Sequence[int], int]] = deque()  # noted by finalizers: where places begin, and the bytes of one
        self._mappings: list[tuple[int, int, mmap.mmap]] = []  # from, to
        self.guard = threading.RLock()
        self._failure: str | None = None  # an error would keep its traceback alive, and with it the model
        self.read_bytes = self.written_bytes = 0

    def reserve(self, size: int, remedy: str = "") -> None:
        """Allocate `size` bytes beside those that are in use. Raises `DiskError`, with one more remedy, if there is no room."""
        with self.guard:
            self.file.extend(self._used + size, remedy)

    def _note(self, transfer: Transfer, spans: Sequence[StoredSpan]) -> None:
        if transfer.error is not None:
            for store in (self, *(span.range.store for span in spans)):
                store._fail(_said(transfer.error))

    def _fail(self, said: str) -> None:
        with self.guard:
            is_first, self._failure = self._failure is None, self._failure or said
        if is_first:
            self._failed(DiskError(said))

    def check(self) -> None:
        """Raise the `DiskError` of the first transfer that failed: a step was made in part, and nothing is right any more."""
        if self._failure is not None:
            raise DiskError(self._failure)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the file, with a storage, and so a version counter, of its own. It must have entries. Raises `DiskError`."""
        size = whole_pages(shape.numel() * dtype.itemsize)
        with self.guard:
            return self._held(shape, dtype, self._range(self._place(size), size))

    def _range(self, start: int, size: int) -> StoredRange:
        return StoredRange(self, start, size)

    def _held(self, shape: torch.Size, dtype: torch.dtype, found: StoredRange) -> torch.Tensor:
        """A tensor that is mapped from a range, and has it as its own."""
        mapped, mapping = self._mapping(found.start, found.start + found.size)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=shape.numel(), offset=found.start - mapped).view(shape)
        found.hold(tensor, self._freed)
        return tensor

    def _place(self, size: int) -> int:
        """Where `size` free bytes begin in the file."""
        for starts, freed in taken(self._freed):
            self._free[freed].extend(starts)
        return self._free[size].pop() if self._free[size] else self._new_place(size)

    def _new_place(self, size: int) -> int:
        self.file.extend(self._used + size)
        start, self._used = self._used, self._used + size
        return start

    def _mapping(self, start: int, end: int) -> tuple[int, mmap.mmap]:
        """A mapping with the bytes from `start` to `end`, and where it begins. One maps all that was allocated together.

        A mapping takes a file descriptor, of which a process has a thousand: fewer than a large model has tensors.
        """
        for first, last, mapping in self._mappings:
            if first <= start and end <= last:
                return first, mapping
        mapping = mmap.mmap(self.file.descriptor, self.file.size - start, offset=start)
        self._mappings.append((start, self.file.size, mapping))
        return start, mapping

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
            at = span.at + offset
            for place, part in span.range.pieces(span.start + offset, size):
                span.range.store.file.read(memory_at(buffer, at, part), place)
                at += part

        def done(transfer: Transfer) -> None:
            self._note(transfer, spans)
            then(transfer)

        if is_update:
            self.count_read(sum(whole_pages(span.size) for span in spans))
        return self._readers.submit(_blocks(spans, block), then=done, is_urgent=not is_update)

    def write(
        self, spans: Sequence[StoredSpan], buffer: torch.Tensor, then: Callable[[Transfer], None] = lambda _: None
    ) -> Transfer:
        """Write spans from a buffer that begins on a page. From now on, `await_writes` of their ranges waits."""

        awaited = [store.before_writes() for store in {span.range.store for span in spans}]

        def block(span: StoredSpan, offset: int, size: int) -> None:
            for wait in awaited:
                wait()
            place = span.range.offset_to_write(span.start + offset)
            span.range.store.file.write(memory_at(buffer, span.at + offset, size), place)

        def begin(transfer: Transfer) -> None:
            for span in spans:
                first, last = span.range.writes.get(transfer, (span.start, span.start))
                span.range.writes[transfer] = min(first, span.start), max(last, span.start + span.size)
                span.range.sources[transfer] = spans, buffer

        def done(transfer: Transfer) -> None:
            try:
                if transfer.error is None:
                    for span in spans:
                        span.range.landed(span.start, whole_pages(span.size))
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                transfer.error = error
            self._note(transfer, spans)
            for span in spans:
                span.range.sources.pop(transfer, None)
                span.range.writes.pop(transfer, None)
            then(transfer)

        with self.guard:
            self.written_bytes += sum(whole_pages(span.size) for span in spans)
        return self._writers.submit(_blocks(spans, block), begin, done)

    def before_writes(self) -> Callable[[], None]:
        """What each block of a write calls first that is given now (disk threads)."""
        return lambda: None

    def settle(self) -> None:
        """Wait until everything is written. Raises the `DiskError` of a transfer that failed."""
        self._writers.settle()
        self.check()


def _blocks(spans: Sequence[StoredSpan], block: Callable[[StoredSpan, int, int], None]) -> list[Callable[[], None]]:
    """`block(span, offset, bytes)` for every block of every span."""
    return [
        functools.partial(block, span, offset, min(BLOCK, whole_pages(span.size) - offset))
        for span in spans
        for offset in range(0, whole_pages(span.size), BLOCK)
    ]


def memory_at(buffer: torch.Tensor, start: int, size: int) -> memoryview:
    assert start + size <= buffer.numel(), "a span ends behind its buffer"
    return memoryview((ctypes.c_uint8 * size).from_address(buffer.data_ptr() + start)).cast("B")


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, DiskError) else f"a transfer failed: {type(error).__name__}: {error}"


def range_of(tensor: torch.Tensor) -> StoredRange | None:
    """The place in a file of the storage of a tensor; None for a tensor that is in memory."""
    storage = tensor.untyped_storage()
    found: StoredRange | None = getattr(storage, _STORED, None)
    return found if found is not None and found.is_at(storage) else None


def is_on_disk(tensor: torch.Tensor) -> bool:
    """As `range_of`, for any tensor: one that is sharded, or of another layout, is in memory."""
    return not is_sharded(tensor) and tensor.layout is torch.strided and range_of(tensor) is not None


def await_writes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, when nothing is being written into its place in a file. Returns at once for a tensor in memory."""
    if (found := range_of(tensor)) is not None:
        found.await_writes()
    return tensor


def whole_spans(tensors: Sequence[torch.Tensor]) -> tuple[list[StoredSpan], int]:
    """Spans of whole stored tensors, one behind the other in a buffer, and the bytes of this buffer."""
    spans, end = [], 0
    for tensor in tensors:
        found = range_of(tensor)
        assert found is not None, "a tensor in memory"
        spans.append(StoredSpan(found, 0, tensor.nbytes, end))
        end += whole_pages(tensor.nbytes)
    return spans, end
