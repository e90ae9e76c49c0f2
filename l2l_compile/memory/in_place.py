"""Host tensors that are page-locked where they are, so that a device copies from their own memory.

Only whole pages are locked that belong to one tensor alone: a system refuses to lock a page twice, and neighbours in a file that
is mapped share pages. The bytes before and behind these pages go through a ring (`devices/staging.py`).
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from l2l_compile.memory.address import address, memory_of_storage
from l2l_compile.units import format_bytes

if TYPE_CHECKING:
    from l2l_compile.memory.pages import PinnedMemory

PAGE = mmap.PAGESIZE
_LOCKED = "_l2l_locked"  # an attribute of storages: it is gone with the storage, whatever else holds on to a tensor

Span = tuple[int, int]  # addresses: the first byte, and the one behind the last


class _Locked:
    """The pages of one storage that are locked.

    memory    where its bytes were when they were locked
    refused   spans that the system does not lock
    """

    def __init__(self, memory: int):
        self.memory = memory
        self.spans: dict[Span, PinnedMemory] = {}
        self.refused: set[Span] = set()

    def release(self) -> None:
        """Undo all locks. Called before the storage frees its memory."""
        while self.spans:
            (first, last), memory = self.spans.popitem()
            memory.unlock_in_place(first, last - first)


def whole_pages(tensor: torch.Tensor) -> Span:
    """The pages that lie entirely within the memory of a contiguous tensor; an empty span for any other tensor."""
    start = sum(address(tensor))
    if not tensor.is_contiguous():
        return start, start
    first, last = -(-start // PAGE) * PAGE, (start + tensor.nbytes) // PAGE * PAGE
    return (first, last) if first < last else (start, start)


def lock_in_place(tensor: torch.Tensor, memory: PinnedMemory) -> None:
    """Page-lock the whole pages of a tensor until its storage is gone, unless they are locked already or the budget is used up.

    Pages that the system refuses to lock are left as they are, with a warning.
    """
    span = first, last = whole_pages(tensor)
    if first == last:
        return
    locked = _of(tensor)
    if span in locked.spans or span in locked.refused or not memory.has_room(last - first):
        return
    if any(first < end and start < last for start, end in locked.spans):  # another tensor in the same storage has a part of them
        return
    try:
        memory.lock_in_place(tensor.untyped_storage(), first, last - first)
    except Exception as error:  # noqa: BLE001 - whatever a driver raises
        locked.refused.add(span)
        warnings.warn(
            f"the system cannot page-lock a frozen parameter of {format_bytes(last - first)} where it is: {error}. It is copied through "
            "a ring of buffers, which takes longer. Lower the option pinned_memory, or load the model into memory of its own",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    locked.spans[span] = memory


def locked_bytes(tensor: torch.Tensor) -> Span:
    """The part of a tensor that is page-locked in place, in bytes from its first entry; (0, 0) if nothing is."""
    locked: _Locked | None = getattr(tensor.untyped_storage(), _LOCKED, None)
    first, last = whole_pages(tensor)
    if locked is None or (first, last) not in locked.spans or locked.memory != memory_of_storage(tensor.untyped_storage()):
        return 0, 0
    start = sum(address(tensor))
    return first - start, last - start


def _of(tensor: torch.Tensor) -> _Locked:
    """The record of a tensor's storage. A storage that has moved since (`share_memory_`) begins a new one."""
    storage = tensor.untyped_storage()
    memory = memory_of_storage(storage)
    locked: _Locked | None = getattr(storage, _LOCKED, None)
    if locked is None or locked.memory != memory:
        if locked is not None:
            locked.release()
        locked = _Locked(memory)
        setattr(storage, _LOCKED, locked)
        weakref.finalize(storage, locked.release).atexit = False
    return locked
