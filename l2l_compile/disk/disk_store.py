"""Tensors in a file, or striped over several. Each is an ordinary tensor over a mapping of its own, and moves by transfers past it.

    reader of the tensor    the mapping: `state_dict()`, `torch.save` and a user's own code work as ever, at the disk's speed
    update                  read(spans, buffer) -> compute in the buffer -> write(spans, buffer)

Between an update and the end of its write, the mapping has old bytes: every reader of this package calls `await_writes` before.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.disk_threads import DiskBlock, DiskThreads, Transfer
from l2l_compile.disk.mapped_parts import Addresses
from l2l_compile.disk.striped_file import StripedFile
from l2l_compile.errors import DiskError, L2LError, RankError
from l2l_compile.memory.finalizers import taken
from l2l_compile.ranks.sharded import is_sharded

_THREADS = 2  # each way, of each folder
_STORED = "_l2l_stored"  # an attribute of storages: it is gone with the storage


class StoredRange:
    """The place of one tensor in the file of a store.

    start, size  in bytes, whole pages: `start` of the place in the file
    writes       transfers into the range that are under way, with the bytes that they write: from, to
    sources      what each of them writes from: spans, and the buffer that they are in
    memory       to which the range is mapped: it stays as long as the range
    """

    def __init__(self, store: DiskStore, start: int, size: int):
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
        self.store.file.write(buffer, self.start + start)

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Bytes from `start` on in transfers: as `StripedFile.blocks`."""
        return self.store.file.blocks(self.start + start, size)

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
    """A file of tensors, striped over folders if there are several, and the threads that read and write it.

    `failed` is called with the error of the first transfer that fails (a disk thread).

    guard                      the lock on what is said of the file
    read_bytes, written_bytes  bytes that transfers have moved so far
    """

    def __init__(self, *folders: str, failed: Callable[[DiskError], object] = lambda _: None):
        self._failed = failed
        self.file = self._opened(folders)
        self._readers, self._writers = (DiskThreads(_THREADS, f"disk-{way}", len(folders)) for way in ("read", "write"))
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size, where ranges of tensors that are gone begin
        self._freed: deque[tuple[Sequence[int], int]] = deque()  # noted by finalizers: where places begin, and the bytes of one
        self._mappings: list[tuple[int, int, Addresses]] = []  # from, to
        self.guard = threading.RLock()
        self._failure: L2LError | None = None  # a new one: that of the transfer keeps its traceback alive, and with it the model
        self.read_bytes = self.written_bytes = 0

    def _opened(self, folders: Sequence[str]) -> StripedFile:
        return StripedFile(folders)

    def reserve(self, size: int, remedy: str = "") -> None:
        """Allocate `size` bytes beside those that are in use. Raises `DiskError`, with one more remedy, if there is no room."""
        with self.guard:
            self.file.extend(self._used + size, remedy)

    def _note(self, transfer: Transfer, spans: Sequence[StoredSpan]) -> None:
        if transfer.error is not None:
            for store in (self, *(span.range.store for span in spans)):
                store._fail(_anew(transfer.error))

    def _fail(self, error: L2LError) -> None:
        with self.guard:
            is_first, self._failure = self._failure is None, self._failure or error
        if is_first and isinstance(error, DiskError):
            self._failed(error)

    def check(self) -> None:
        """Raise the `DiskError` of the first transfer that failed: a step was made in part, and nothing is right any more.

        If the commit of another rank did not come, it is a `RankError`.
        """
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the file, with a storage, and so a version counter, of its own. It must have entries. Raises `DiskError`."""
        size = whole_pages(shape.numel() * dtype.itemsize)
        with self.guard:
            return self._held(shape, dtype, self._range(self._place(size), size))

    def _range(self, start: int, size: int) -> StoredRange:
        return StoredRange(self, start, size)

    def _held(self, shape: torch.Size, dtype: torch.dtype, found: StoredRange) -> torch.Tensor:
        """A tensor that is mapped from a range, and has it as its own."""
        found.memory, begin = self._memory_of(found)
        tensor = torch.frombuffer(found.memory, dtype=dtype, count=shape.numel(), offset=begin).view(shape)
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

    def _memory_of(self, found: StoredRange) -> tuple[Addresses, int]:
        """Memory that shows a range, and where in it the range begins. One mapping shows all that was allocated together."""
        for first, last, memory in self._mappings:
            if first <= found.start and found.start + found.size <= last:
                return memory, found.start - first
        memory = self.file.mapped(found.start, self.file.size - found.start)
        self._mappings.append((found.start, self.file.size, memory))
        return memory, 0

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
        return self._readers.submit(_blocks(spans, block), then=done, is_urgent=not is_update)

    def write(
        self, spans: Sequence[StoredSpan], buffer: torch.Tensor, then: Callable[[Transfer], None] = lambda _: None
    ) -> Transfer:
        """Write spans from a buffer that begins on a page. From now on, `await_writes` of their ranges waits."""

        awaited = [store.before_writes() for store in {span.range.store for span in spans}]

        def block(span: StoredSpan, offset: int, size: int) -> None:
            for wait in awaited:
                wait()
            span.range.write(memory_at(buffer, span.at + offset, size), span.start + offset)

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


def _blocks(spans: Sequence[StoredSpan], block: Callable[[StoredSpan, int, int], None]) -> list[DiskBlock]:
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
