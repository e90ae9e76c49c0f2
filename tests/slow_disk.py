"""A disk for tests: slower than a real one, full or failing at a given byte, or cutting transfers short."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from l2l_compile.disk import striped_file
from l2l_compile.disk.disk_file import PAGE, DiskFile


@dataclass
class Faults:
    """What is wrong with the disk.

    rate          bytes a second, each way; None for those of the real disk
    read_fails    an errno, and behind how many bytes that were read it is raised; so `write_fails`
    room          bytes that can be allocated
    short         whether each transfer moves one page at most; `cut` moves half a page
    files         that were opened
    """

    rate: float | None = None
    read_fails: tuple[int, int] | None = None
    write_fails: tuple[int, int] | None = None
    room: int | None = None
    short: bool = False
    cut: bool = False
    refuses_direct: bool = False
    files: list[SlowFile] = field(default_factory=list)


class SlowFile(DiskFile):
    """A file on such a disk. Mappings of it are as fast as the real one."""

    def __init__(self, folder: str, name: str | None, faults: Faults):
        self._faults = faults
        self._until = {"read": 0.0, "write": 0.0}  # when the disk has done what was given to it
        self._moved = {"read": 0, "write": 0}
        self._guard = threading.Lock()
        super().__init__(folder, name)
        faults.files.append(self)

    def _allocate(self, start: int, size: int) -> None:
        if self._faults.room is not None and start + size > self._faults.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._allocate(start, size)

    def _sees_both_ways(self) -> bool:
        if self._faults.refuses_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super()._sees_both_ways()

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        with self._as_slow_as("read", len(buffer), self._faults.read_fails) as size:
            return super()._preadv(buffer[:size], offset)

    def _pwritev(self, buffer: memoryview, offset: int) -> int:
        """Begins to write when the time of the transfer is over: whoever reads too early finds the old bytes."""
        with self._as_slow_as("write", len(buffer), self._faults.write_fails) as size:
            return super()._pwritev(buffer[:size], offset)

    @contextlib.contextmanager
    def _as_slow_as(self, way: str, size: int, fails: tuple[int, int] | None) -> Iterator[int]:
        if self._faults.cut:
            yield PAGE // 2
            return
        size = min(size, PAGE) if self._faults.short else size
        with self._guard:
            self._moved[way] += size
            is_over = fails is not None and self._moved[way] > fails[1]
            start = max(time.perf_counter(), self._until[way])
            self._until[way] = end = start + (size / self._faults.rate if self._faults.rate else 0.0)
        if is_over:
            raise OSError(fails[0], os.strerror(fails[0]))
        time.sleep(max(0.0, end - time.perf_counter()))
        yield size


@contextlib.contextmanager
def slow_disk(faults: Faults, others: Mapping[object, Faults] | None = None) -> Iterator[Faults]:
    """Context manager in which stores are on such a disk, and in some folders on `others`."""
    of_folder = {str(folder): each for folder, each in (others or {}).items()}
    opened = lambda folder, name: SlowFile(folder, name, of_folder.get(folder, faults))  # noqa: E731 - a short one
    with mock.patch.object(striped_file, "DiskFile", opened):
        yield faults


def holders(folder: object) -> list[str]:
    """The open files, and mappings, of all processes that are in a folder: the kernel frees a file without a name with the last one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found += [line for line in (process / "maps").read_text().splitlines() if f"{folder}/" in line]
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found += [path for path in [os.readlink(descriptor)] if path.startswith(f"{folder}/")]
    return found


def is_freed_within(seconds: float, folder: object) -> bool:
    """Whether no process holds a file of a folder any more, within so many seconds."""
    until = time.monotonic() + seconds
    while holders(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
