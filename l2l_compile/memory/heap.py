"""Keeps large tensors out of the heap of the C library, and returns its unused pages to the operating system.

glibc keeps a freed buffer for the next buffer of its size. Tensors are aligned buffers, and these do not fit into the
hole that an equal one has left. If tensors that stay are allocated between tensors that are freed, the heap grows by all.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3  # of mallopt
_USUAL = 32 << 20  # bytes; where glibc's own adjustment of the threshold ends
_active: list[int] = []
_guard = threading.RLock()


@contextmanager
def apart_from_the_heap(size: int = 1 << 16) -> Iterator[None]:
    """Context manager in which allocations of at least `size` bytes, by any thread, are mapped from the system, and go back to it.

    Does nothing where the C library is not glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    with _guard:
        _active.append(size)
        set_option(_M_MMAP_THRESHOLD, min(_active))
    try:
        yield
    finally:
        with _guard:
            _active.remove(size)
            set_option(_M_MMAP_THRESHOLD, min(_active, default=_USUAL))


def trim_the_heap() -> None:
    """Give unused pages of the heap back to the system. Takes about a millisecond for 50 MiB of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
