"""A ring of page-locked buffers through which host memory that is not page-locked goes to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..memory.pages import PinnedMemory

_SLOTS = 4
_SLOT_BYTES = 8 << 20  # enough that a copy takes longer than its call


def ring_bytes(budget: int | None) -> int:
    """Page-locked bytes of the ring under a budget (None: no bound)."""
    return _SLOTS * (_SLOT_BYTES if budget is None else min(_SLOT_BYTES, budget // (2 * _SLOTS)))


class Staging:
    """Copies host memory into a slot, and from there to the device; a slot is used again when its copy is done.

    record   returns an event after the copies given so far (None: they are done)
    wait     blocks the calling thread until an event has happened
    """

    def __init__(self, memory: PinnedMemory, record: Callable[[], Any], wait: Callable[[Any], object]):
        self._record, self._wait = record, wait
        size = ring_bytes(memory.budget) // _SLOTS
        self._slots = [memory.take(size, "the staging ring")[0] for _ in range(_SLOTS)]
        self._events: list[Any] = [None] * _SLOTS
        self._next = 0

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a host tensor, of any strides, into contiguous device memory, uint8, of the same size in bytes."""
        entries, each = source.detach().reshape(-1), source.element_size()
        count = self._slots[0].numel() // each
        for start in range(0, entries.numel(), count):
            part = entries[start : start + count]
            slot, self._next = self._next, (self._next + 1) % _SLOTS
            if self._events[slot] is not None:
                self._wait(self._events[slot])
            staged = self._slots[slot][: part.numel() * each]
            staged.view(part.dtype).copy_(part)
            target[start * each : start * each + staged.numel()].copy_(staged, non_blocking=True)
            self._events[slot] = self._record()
