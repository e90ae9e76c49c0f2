"""A ring of page-locked buffers through which host memory that is not page-locked goes to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from l2l_compile.disk.stored_entries import read_in_order
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.memory.in_place import PAGE
from l2l_compile.memory.layout import aligned
from l2l_compile.memory.pages import PinnedMemory

SLOTS = 4
_EDGES = 1024  # slots of a page: the fetches of a whole pass over dozens of layers do not wait for one
_SLOT_BYTES = BLOCK  # enough that a copy takes longer than its call


def edge_bytes() -> int:
    """Page-locked bytes of the ring for the ends of tensors that are page-locked in place."""
    return _EDGES * PAGE


def ring_bytes(budget: int | None) -> int:
    """Page-locked bytes of the ring under a budget (None: no bound)."""
    return SLOTS * (_SLOT_BYTES if budget is None else min(_SLOT_BYTES, budget // (2 * SLOTS)))


class Staging:
    """Copies host memory into a slot, and from there to the device. A slot holds several small tensors, one behind the other; it is
    used again when their copies are done.

    record   returns an event after the copies given so far (None: they are done)
    wait     blocks the calling thread until an event has happened
    """

    def __init__(self, memory: PinnedMemory, record: Callable[[], Any], wait: Callable[[Any], object]):
        self._memory, self._record, self._wait = memory, record, wait
        self._edges: Staging | None = None
        self._of_disk: Staging | None = None
        self._begin(SLOTS, ring_bytes(memory.budget) // SLOTS)

    def _begin(self, slots: int, size: int) -> None:
        self._slots = list(self._memory.take(slots * size, "the staging ring")[0].view(slots, size))
        self._events: list[Any] = [None] * slots  # of the last copy out of each slot that is full
        self._slot = self._filled = 0  # the slot that is being filled, and how many bytes of it are

    def send_in_place(self, source: torch.Tensor, target: torch.Tensor, first: int, last: int) -> None:
        """As `send`, for a contiguous source that is page-locked from byte `first` to byte `last`: a device copies from there."""
        if first == last:
            self.send(source, target)
            return
        if self._edges is None:
            self._edges = copy.copy(self)
            self._edges._begin(_EDGES, PAGE)
        entries = source.detach().view(-1).view(torch.uint8)
        target[first:last].copy_(entries[first:last], non_blocking=True)
        for start, end in ((0, first), (last, entries.numel())):
            if start < end:
                self._edges.send(entries[start:end], target[start:end])

    def send_stored(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As `send`, for a contiguous source on disk: it is read into slots of their own, ahead of the copies. Raises `DiskError`."""
        if self._of_disk is None:
            self._of_disk = copy.copy(self)
            self._of_disk._begin(SLOTS, max(PAGE, self._slots[0].numel() // PAGE * PAGE))
        self._of_disk._send_blocks(source, target)

    def _send_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Read one block into each slot, and copy it from there to the device."""

        def take(block: torch.Tensor, start: int) -> None:
            target[start : start + block.numel()].copy_(block, non_blocking=True)
            self._events[self._given.pop(0)] = self._record()

        def slot() -> torch.Tensor:
            self._given.append(self._next())
            return self._slots[self._given[-1]]

        self._given: list[int] = []  # slots that are being read into, in order
        read_in_order(source.detach(), slot, len(self._slots), take)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a host tensor, of any strides, into contiguous device memory, uint8, of the same size in bytes."""
        entries, each = source.detach().reshape(-1), source.element_size()
        count = self._slots[0].numel() // each
        for start in range(0, entries.numel(), count):
            part = entries[start : start + count]
            slot, begin = self._place(part.nbytes)
            staged = self._slots[slot][begin : begin + part.nbytes]
            staged.view(part.dtype).copy_(part)
            target[start * each : start * each + staged.numel()].copy_(staged, non_blocking=True)

    def _place(self, size: int) -> tuple[int, int]:
        """A slot, and where its next `size` bytes begin: in the slot that is being filled, or in the next one when its copies are done."""
        if self._filled + size > self._slots[self._slot].numel():
            self._events[self._slot] = self._record()
            self._next()
        begin, self._filled = self._filled, self._filled + aligned(size)
        return self._slot, begin

    def _next(self) -> int:
        """The next slot, when the copies out of it are done."""
        self._slot, self._filled = (self._slot + 1) % len(self._slots), 0
        if self._events[self._slot] is not None:
            self._wait(self._events[self._slot])
        return self._slot
