"""Switches Python's cycle collection off while a program is made: it would visit millions of live objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Context manager in which cycles are collected only by an explicit `gc.collect()`. Afterwards, collection is as it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
