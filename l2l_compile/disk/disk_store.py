"""Tensors in a file, or striped over several. Each is an ordinary tensor over a mapping of its own, and moves by transfers past it.

    reader of the tensor    the mapping: `state_dict()`, `torch.save` and a user's own code work as ever, at the disk's speed
    update                  read(spans, buffer) -> compute in the buffer -> write(spans, buffer)

Between an update and the end of its write, the mapping has old bytes: every reader of this package calls `await_writes` before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.disk_threads import IN_A_FORK, DiskThreads, Transfer
from l2l_compile.disk.mapped_parts import Addresses
from l2l_compile.disk.stored_range import (
    STORED,
    THREADS,
    ReadableStore,
    StoredRange,
    StoredSpan,
    blocks_of,
    memory_at,
    reader_threads,
)
from l2l_compile.disk.striped_file import StripedFile
from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import taken
from l2l_compile.ranks.sharded import is_sharded


class DiskStore(ReadableStore):
    """A file of tensors, striped over folders if there are several, and the threads that read and write it.

    written_bytes  bytes that transfers have written so far
    """

    file: StripedFile

    def __init__(self, *folders: str, failed: Callable[[DiskError], object] = lambda _: None):
        self.file = self._opened(folders)
        super().__init__(reader_threads(len(folders)), failed)
        self._writers = DiskThreads(THREADS, "disk-write", len(folders))
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size, where ranges of tensors that are gone begin
        self._freed: deque[tuple[Sequence[int], int]] = deque()  # noted by finalizers: where places begin, and the bytes of one
        self._mappings: list[tuple[int, int, Addresses]] = []  # from, to
        self.written_bytes = 0

    def _opened(self, folders: Sequence[str]) -> StripedFile:
        return StripedFile(folders)

    def reserve(self, size: int, remedy: str = "") -> None:
        """Allocate `size` bytes beside those that are in use. Raises `DiskError`, with one more remedy, if there is no room."""
        with self.guard:
            self.file.extend(self._used + size, remedy)

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

    def write(
        self, spans: Sequence[StoredSpan], buffer: torch.Tensor, then: Callable[[Transfer], None] = lambda _: None
    ) -> Transfer:
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
        return self._writers.submit(blocks_of(spans, block), begin, done)

    def refuse_in_a_fork(self) -> None:
        """Raise `DiskError` in a process that was forked from the one that made this store."""
        if self._writers.is_in_a_fork:
            raise DiskError(IN_A_FORK)

    def write_block(self, buffer: memoryview, start: int) -> None:
        self.file.write(buffer, start)

    def before_writes(self) -> Callable[[], None]:
        """As `ReadableStore.before_writes`. Raises `DiskError` in a forked process."""
        self.refuse_in_a_fork()
        return lambda: None

    def settle(self) -> None:
        """Wait until everything is written. Raises the `DiskError` of a transfer that failed."""
        self._writers.settle()
        self.check()


def range_of(tensor: torch.Tensor) -> StoredRange | None:
    """The place in a file of the storage of a tensor; None for a tensor that is in memory."""
    storage = tensor.untyped_storage()
    found: StoredRange | None = getattr(storage, STORED, None)
    return found if found is not None and found.is_at(storage) else None


def place_of(tensor: torch.Tensor) -> StoredRange | None:
    """As `range_of`, of a tensor that updates write in its file: one that is in place is in memory for them."""
    found = range_of(tensor)
    return None if found is None or found.is_in_place else found


def is_on_disk(tensor: torch.Tensor) -> bool:
    """As `range_of`, for any tensor: one that is sharded, or of another layout, is in memory."""
    return _may_be_stored(tensor) and range_of(tensor) is not None


def has_place(tensor: torch.Tensor) -> bool:
    """As `place_of`, for any tensor."""
    return _may_be_stored(tensor) and place_of(tensor) is not None


def is_in_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on disk in a file that is only read."""
    return is_on_disk(tensor) and not has_place(tensor)


def _may_be_stored(tensor: torch.Tensor) -> bool:
    return not is_sharded(tensor) and tensor.layout is torch.strided


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
