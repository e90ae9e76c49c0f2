"""A memory cgroup of the operating system, for processes that are to have little memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


def memory_cgroup(name: str, limit: int) -> Iterator[Path]:
    """A memory cgroup with a limit, and its file of processes; version 1 or 2. Skips where none can be made."""
    is_first = (ROOT / "memory").is_dir()
    group = (ROOT / "memory" if is_first else ROOT) / name
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()
