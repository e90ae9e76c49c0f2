"""Python's collection of cycles rests while a program is made: it would go through millions of live objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rests() -> Iterator[None]:
    """Within it, no cycles are collected, unless somebody asks for it; as before behind it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
