"""A file in a folder: opened, extended, read and written in blocks. Every failure is a sentence with path and bytes.

A file without a name is freed by the kernel however the process ends. One with a name outlives the process. Space is allocated
before it is used: a full file system is an error here, and never a SIGBUS in a mapping of the file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

from l2l_compile.errors import DiskError
from l2l_compile.units import format_bytes
from l2l_compile.user_line import warn

PAGE = mmap.PAGESIZE
PROBED = 16 * PAGE  # bytes at the beginning of a file with which a file system is tried
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def whole_pages(size: int) -> int:
    """Bytes of the pages that `size` bytes take."""
    return -(-size // PAGE) * PAGE


class DiskFile:
    """A file, read and written at offsets that are multiples of a page, into memory that begins on a page.

    folder      where the file is
    name        in the folder; None for a file without a name. A file that exists keeps its bytes
    descriptor  of the file
    size        bytes that are allocated
    contents    what is in it, for errors
    remedy      what to do behind a failed transfer, for errors
    direct      whether transfers pass the page cache by (O_DIRECT)
    """

    def __init__(self, folder: str, name: str | None = None):
        self.folder, self.name = folder, name
        self.contents, self.remedy = PARAMETERS, LOST if name is None else RESUMES
        self.descriptor, self.direct = _opened(folder, name)
        self.size = os.fstat(self.descriptor).st_size
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # a disk thread may still use it

    def extend(self, size: int, remedy: str = "") -> None:
        """Allocate `size` bytes in all. Raises `DiskError` if the file system has no room for them; `remedy` is one more than the usual."""
        if size <= self.size:
            return
        try:
            self._allocate(self.size, size - self.size)
        except OSError as error:
            free = os.statvfs(self.folder)
            raise DiskError(
                f"{self.folder}: {error.strerror or error} while {format_bytes(size - self.size)} were allocated there for {self.contents} "
                f"({format_bytes(free.f_bavail * free.f_frsize)} are free, {format_bytes(self.size)} are allocated "
                f"already): free some space, or give 'disk' another folder{remedy}"
            ) from error
        self.size = size

    def probe(self) -> None:
        """Try direct transfers beside a mapping of the file. Where they are refused or not seen, the page cache is used, with a warning."""
        self.extend(PROBED)
        if not self.direct:
            return
        try:
            is_seen = self._sees_both_ways()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._failed(error, "tried", 0, PROBED) from error
            self._use_page_cache("it refuses direct transfers")
            return
        if not is_seen:
            self._use_page_cache("a mapping does not see a direct write, or a direct read does not see a write into the mapping")

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of whole pages. Raises `DiskError`."""
        self._transfer(self._preadv, buffer, offset, "read")
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write a buffer of whole pages. Raises `DiskError`."""
        self._transfer(self._pwritev, buffer, offset, "written")

    def not_mapped(self, error: OSError, offset: int, size: int) -> DiskError:
        """The error of a mapping that failed."""
        return DiskError(
            f"{self.folder}: {error.strerror} while {size} bytes at byte {offset} were mapped: raise vm.max_map_count above the number of "
            f"tensors. {self.remedy}"
        )

    def sync(self) -> None:
        """Return when all bytes that were written, also into mappings, are on the device (`fdatasync`). Raises `DiskError`."""
        try:
            self._sync()
        except OSError as error:
            raise self._failed(error, "made durable", 0, self.size) from error

    def _transfer(self, call: Callable[[memoryview, int], int], buffer: memoryview, offset: int, done: str) -> None:
        """Repeat a transfer that the kernel has cut short, from its last whole page on."""
        moved = 0
        while moved < len(buffer):
            try:
                count = call(buffer[moved:], offset + moved)
            except OSError as error:
                raise self._failed(error, done, offset + moved, len(buffer) - moved) from error
            is_last = moved + count == len(buffer)
            if not is_last and count < PAGE:
                raise DiskError(
                    f"{self.folder}: {count} of {len(buffer) - moved} bytes at byte {offset + moved} were {done}: the file was cut short, "
                    f"or the disk fails. {self.remedy}"
                )
            moved += count if is_last else count // PAGE * PAGE

    def _allocate(self, start: int, size: int) -> None:
        os.posix_fallocate(self.descriptor, start, size)

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self.descriptor, [buffer], offset)

    def _pwritev(self, buffer: memoryview, offset: int) -> int:
        return os.pwritev(self.descriptor, [buffer], offset)

    def _failed(self, error: OSError, done: str, offset: int, size: int) -> DiskError:
        return DiskError(
            f"{self.folder}: {error.strerror or error} while {size} bytes at byte {offset} of the file of {self.contents} were "
            f"{done}. {self.remedy}"
        )

    def _sync(self) -> None:
        os.fdatasync(self.descriptor)

    def _sees_both_ways(self) -> bool:
        """Whether a mapping sees a direct write, and a direct read a write into the mapping."""
        with mmap.mmap(self.descriptor, PROBED) as mapping, mmap.mmap(-1, PROBED) as memory:
            before = mapping[:]  # the pages are in the page cache now
            memory[:] = bytes(each ^ 0x55 for each in before)
            with memoryview(memory) as view:
                count = os.pwritev(self.descriptor, [view], 0)
                is_seen = count == PROBED and mapping[:] == memory[:]
                mapping[:] = bytes(each ^ 0xFF for each in memory[:])
                count = os.preadv(self.descriptor, [view], 0)
            return is_seen and count == PROBED and mapping[:] == memory[:]

    def _use_page_cache(self, why: str) -> None:
        use_page_cache(self.descriptor)
        self.direct = False
        _say_buffered(self.folder, why)


PARAMETERS = "parameters and optimizer state"
LOST = "Parameters are incomplete: load the last checkpoint in a new process"
RESUMES = "This step is incomplete: a new process resumes from the last complete one (l2l_compile.resume)"


def use_page_cache(descriptor: int) -> None:
    """Have transfers of a file go through the page cache from now on."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _say_buffered(folder: str, why: str) -> None:
    warn(
        f"backend 'l2l': the file system of {folder} takes the page cache for option 'disk', which costs several times the processor time: "
        f"{why}"
    )


def _opened(folder: str, name: str | None) -> tuple[int, bool]:
    """A descriptor of a file, and whether its transfers are direct. Raises `DiskError`."""
    try:
        try:
            return _descriptor(folder, name, os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        descriptor = _descriptor(folder, name, 0)
    except OSError as error:
        raise DiskError(
            f"{folder}: {error.strerror or error} while a file was opened there: give the option 'disk' a folder"
            " that exists and may be written"
        ) from error
    _say_buffered(folder, "it refuses files for direct transfers")
    return descriptor, False


def _descriptor(folder: str, name: str | None, flags: int) -> int:
    if name is None:
        return _unnamed(folder, flags)
    return os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | flags, 0o600)


def _unnamed(folder: str, flags: int) -> int:
    """A file that never had a name, or one whose name is removed at once."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
    made, path = tempfile.mkstemp(prefix="l2l-", dir=folder)
    try:
        return os.open(path, os.O_RDWR | flags)
    finally:
        os.close(made)
        os.unlink(path)
