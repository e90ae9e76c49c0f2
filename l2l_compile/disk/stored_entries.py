"""Parts of stored tensors, read and written past their mappings: a read of one page there brings megabytes into the page cache."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import DiskStore, await_writes, place_of, range_of
from l2l_compile.disk.disk_threads import Transfer
from l2l_compile.disk.stored_range import ReadableStore, StoredRange, StoredSpan
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.memory.pages import huge_pages, pages

_SAMPLED = 4  # runs of entries of a tensor


def pages_around(tensor: torch.Tensor) -> tuple[StoredRange, int, int, int]:
    """Where the entries of a contiguous stored tensor are: its range, the bytes of it from a page to a page, and where the entries begin.

    The last one is counted from the first page.
    """
    found = range_of(tensor)
    assert found is not None and tensor.is_contiguous(), "a tensor that is in memory, or scattered in its file"
    begin = found.shift + int(tensor.storage_offset()) * tensor.element_size()
    first = begin // PAGE * PAGE
    return found, first, whole_pages(begin + tensor.nbytes), begin - first


def read_in_order(
    tensor: torch.Tensor,
    buffers: Callable[[], torch.Tensor],
    count: int,
    take: Callable[[torch.Tensor, int], None],
    *,
    is_update: bool = False,
) -> None:
    """Read the bytes of a contiguous stored tensor, `count` blocks at a time, and give them to `take` in order, each with its first byte.

    buffers    gives the buffer for a block, which begins on a page; it is used until `take` has returned
    is_update  as for `DiskStore.read`
    Raises `DiskError`.
    """
    found, first, last, before = pages_around(tensor)
    reading: deque[tuple[int, torch.Tensor, Transfer]] = deque()

    def take_one() -> None:
        start, buffer, transfer = reading[0]
        transfer.wait()
        reading.popleft()
        begin, end = max(0, before - start), min(buffer.numel(), before + tensor.nbytes - start)
        take(buffer[begin:end], start + begin - before)

    try:
        start = 0
        while start < last - first:
            if len(reading) == count:
                take_one()
            buffer = buffers()
            buffer = buffer[: min(buffer.numel(), last - first - start)]
            transfer = found.store.read([StoredSpan(found, first + start, buffer.numel(), 0)], buffer, is_update=is_update)
            reading.append((start, buffer, transfer))
            start += buffer.numel()
        while reading:
            take_one()
    finally:
        for _, _, transfer in reading:  # their buffers are another's soon
            transfer.settle()


def moved_to_disk(store: DiskStore, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor in the file of a store, written when this returns. Raises `DiskError`."""
    made = store.empty(tensor.shape, tensor.dtype)
    fill(made, tensor)
    return made


def fill(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Write the entries of `source`, of the same shape, into a tensor in its dtype. One in a file is written when this returns.

    Takes one block of memory. Raises `DiskError`.
    """
    if place_of(tensor) is None:
        await_writes(tensor).detach().copy_(source.detach())
        return
    write_entries(tensor.detach().view(-1), 0, source)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def write_entries(target: torch.Tensor, start: int, source: torch.Tensor) -> None:
    """Write a tensor into a flat tensor from entry `start` on, in the dtype of that. One that is stored, behind writes that are under way.

    There, the bytes begin on a page, and end on one or with the stored tensor. Raises `DiskError`.
    """
    if place_of(target) is None:
        target[start : start + source.numel()] = source.detach().reshape(-1)
        return
    found, first, _, before = pages_around(target)
    flat, width = source.detach().reshape(-1), target.element_size()
    begin = first + start * width
    assert before == 0 and begin % PAGE == 0, "entries that begin within a page"
    found.await_writes(begin, begin + len(flat) * width)
    buffer = huge_pages(min(BLOCK, whole_pages(len(flat) * width)), "parameters on their way to the disk")
    for at in range(0, len(flat), BLOCK // width):
        part = read_entries(flat, slice(at, at + BLOCK // width))
        size = part.numel() * width
        buffer[:size].view(target.dtype).copy_(part)
        found.store.write([StoredSpan(found, begin + at * width, size, 0)], buffer, functools.partial(_hold, target)).wait()


def _hold(tensor: torch.Tensor, _: Transfer) -> None:
    """Bound to a transfer: its tensor, and so its place in the file, stays as long as the transfer, also if nobody waits for it."""


def read_entries(flat: torch.Tensor, entries: slice) -> torch.Tensor:
    """Entries of a flat tensor, which may be stored: then a copy in memory. Raises `DiskError`."""
    part = flat.detach()[entries]
    if range_of(part) is None:
        return part
    buffer = huge_pages(min(BLOCK, whole_pages(part.nbytes) + PAGE), "a part of a parameter on disk")
    read = torch.empty_like(part)

    def take(block: torch.Tensor, start: int) -> None:
        read.view(torch.uint8)[start : start + block.numel()] = block

    read_in_order(part, lambda: buffer, 1, take, is_update=True)
    return read


def sample(tensors: Sequence[torch.Tensor], generation: int, runs: int = _SAMPLED) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """About `runs` runs of entries, evenly spread, others in every generation: positions in the flat tensors, and the entries there of each.

    All tensors have as many entries; some may be in memory. Raises `DiskError`.
    """
    return samples([tensors], generation, runs)[0]


def samples(
    groups: Iterable[Sequence[torch.Tensor]], generation: int, runs: int = _SAMPLED
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """`sample` of each group of tensors. All pages are read at a time, before what updates read: one wait for the disk and not one for each."""
    asked, found = [], _Runs()
    for tensors in groups:
        run = max(1, min(PAGE // min(t.element_size() for t in tensors), tensors[0].numel()))
        count = tensors[0].numel() // run
        stride = max(1, count // runs)
        begins = [number * run for number in range(generation % stride, count, stride)]
        positions = (torch.tensor(begins, dtype=torch.int64)[:, None] + torch.arange(run)).view(-1)
        asked.append((positions, [(t.dtype, [found.add(t, begin, run) for begin in begins]) for t in tensors]))
    found.read()
    return [
        (positions, [torch.cat([torch.empty(0, dtype=dtype), *(take() for take in takes)]) for dtype, takes in of_tensors])
        for positions, of_tensors in asked
    ]


def some_entries(tensor: torch.Tensor, generation: int, runs: int = _SAMPLED) -> torch.Tensor:
    """The entries of `sample` of one tensor."""
    return sample([tensor], generation, runs)[1][0]


class _Runs:
    """Runs of entries of tensors, one behind the other in the memory or the file of each, that are read together."""

    def __init__(self) -> None:
        self._spans: defaultdict[ReadableStore, list[StoredSpan]] = defaultdict(list)
        self._size = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def add(self, tensor: torch.Tensor, start: int, count: int) -> Callable[[], torch.Tensor]:
        """Ask for `count` entries from `start` on. What is returned gives them, behind `read`. Raises `DiskError`."""
        own = tensor.detach()
        part = own.as_strided((count,), (1,), int(own.storage_offset()) + start)
        if range_of(part) is None:
            return lambda: part
        found, first, last, before = pages_around(part)
        in_flight = found.bytes_in_flight(first, last - first)
        if in_flight is not None:
            return lambda: in_flight[before : before + part.nbytes].view(part.dtype)
        found.await_writes(first, last)
        at = self._size
        self._spans[found.store].append(StoredSpan(found, first, last - first, at))
        self._size += last - first
        return lambda: self._buffer[at + before : at + before + part.nbytes].view(part.dtype)

    def read(self) -> None:
        """Read what was asked for, and is on a disk. Raises `DiskError`."""
        if not self._size:
            return
        self._buffer = pages(self._size, "samples of parameters on disk")
        reading = [store.read(spans, self._buffer, is_update=False) for store, spans in self._spans.items()]
        try:
            for transfer in reading:
                transfer.wait()
        finally:
            for transfer in reading:  # an error of one, or of a signal's handler: the others still write into the buffer
                transfer.settle()
        for store, spans in self._spans.items():
            store.count_read(sum(span.size for span in spans))
