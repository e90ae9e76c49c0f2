"""A line on stderr for work that takes more than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 2.0  # seconds


class Progress:
    """Says what is under way, once per piece of work that takes longer than `_PATIENCE`."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def __call__(self, what: str) -> None:
        """`what` begins: it is printed if it takes longer than `_PATIENCE`."""
        self.end()
        self._timer = threading.Timer(_PATIENCE, lambda: print(f"l2l: {what} ...", file=sys.stderr, flush=True))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Nothing is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextmanager
def progress() -> Iterator[Progress]:
    """A `Progress`, ended with the context."""
    made = Progress()
    try:
        yield made
    finally:
        made.end()
