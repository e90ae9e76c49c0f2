"""Large tensors apart from the heap of the C library, and the heap no larger than what it holds.

glibc keeps a buffer that is freed for the next of its size, but aligned buffers, as tensors are, do not fit into the
hole that an equal one has left. Where tensors that stay are made between tensors that go, the heap grows by all of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3  # of mallopt
_USUAL = 32 << 20  # bytes; where glibc's own adjustment of the threshold ends
_active: list[int] = []
_guard = threading.Lock()


@contextmanager
def apart_from_the_heap(size: int = 1 << 16) -> Iterator[None]:
    """Memory of at least `size` bytes that anybody allocates meanwhile is mapped from the system, and goes back to it.

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
    """Give pages of the heap that hold nothing back to the system: about a millisecond where there are 50 MiB of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
