"""Tensors in files of the user, read in place: each is an ordinary tensor over a private mapping, and its file is never written.

    file          | header | a |  b  | c |
    range of b               [  ..b..  ]      whole pages; `shift` bytes of the first one are before b

A page that anything has written into is memory of the process from then on. Reads past the mapping take such pages from there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch

from l2l_compile.disk.disk_file import PAGE, use_page_cache, whole_pages
from l2l_compile.disk.disk_threads import DiskThreads
from l2l_compile.disk.mapped_parts import map_part, reserved
from l2l_compile.disk.stored_range import ReadableStore, StoredRange, memory_at, reader_threads
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.disk.written_pages import OF_FILES, check_says_what_is_written, written_pages
from l2l_compile.errors import DiskError
from l2l_compile.memory.pages import pages
from l2l_compile.user_line import warn

_AGAIN = "build the model anew and load it again"


class FileInPlace:
    """A file of the user. One that is changed is an error; one that is removed, or replaced by another, stays readable as it was.

    device  the number of the disk that it is on
    queue   the number of the queue of its reads
    """

    def __init__(self, path: Path):
        self.path, self.queue = path, 0
        try:
            self._descriptor, self._is_direct = _opened(path)
            weakref.finalize(self, os.close, self._descriptor).atexit = False  # a disk thread may still use it
            found = os.fstat(self._descriptor)
            self.size, self.device, self._modified = found.st_size, found.st_dev, found.st_mtime_ns
            self._probe()
        except OSError as error:
            raise DiskError(
                f"{path}: {error.strerror or error} while it was opened to be read in place: leave out in_place=True"
            ) from error

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of whole pages, as far as the file reaches. Raises `DiskError`."""
        done, wanted = 0, min(len(buffer), self.size - start)
        while done < wanted:
            try:
                count = self._preadv(buffer[done:], start + done)
            except OSError as error:
                raise DiskError(
                    f"{self.path}: {error.strerror or error} while {wanted - done} bytes at byte {start + done} were read in place: {_AGAIN}"
                ) from error
            is_last = done + count >= wanted
            if not is_last and count < PAGE:
                self.check()
                raise DiskError(
                    f"{self.path}: {count} of {wanted - done} bytes at byte {start + done} were read in place: the disk fails. {_AGAIN.capitalize()}"
                )
            done += count if is_last else count // PAGE * PAGE
        if not self._is_direct:
            os.posix_fadvise(self._descriptor, start, len(buffer), os.POSIX_FADV_DONTNEED)

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Bytes in transfers of at most `BLOCK`: the number of the queue, which byte is the first, and how many."""
        for first in range(0, size, BLOCK):
            yield self.queue, first, min(BLOCK, size - first)

    def map(self, address: int, start: int, size: int) -> None:
        """Map bytes to addresses. Writes there stay in memory. Raises `DiskError`."""
        try:
            map_part(address, size, self._descriptor, start, is_private=True)
        except OSError as error:
            raise DiskError(
                f"{self.path}: {error.strerror} while {size} bytes at byte {start} were mapped: raise vm.max_map_count above the number of "
                "tensors, and the limits of virtual memory (ulimit -v, vm.overcommit_memory)"
            ) from error

    def check(self) -> None:
        """Raise `DiskError` if the file has changed."""
        try:
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise DiskError(f"{self.path}: {error.strerror or error} while it was read in place: {_AGAIN}") from error
        if (found.st_size, found.st_mtime_ns) != (self.size, self._modified):
            raise DiskError(f"{self.path} has changed since load_pretrained(in_place=True) opened it: {_AGAIN}")

    def _probe(self) -> None:
        """Try a direct transfer. Where it is refused, the page cache is used, with a warning."""
        page = pages(PAGE, "the first page of a file")
        try:
            self._preadv(memory_at(page, 0, PAGE), 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            use_page_cache(self._descriptor)
            self._is_direct = False
        if not self._is_direct:
            warn(
                f"backend 'l2l': the file system of {self.path} takes the page cache for weights in place, which costs several times the processor "
                "time: it refuses direct transfers"
            )

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [buffer], offset)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of a file, and whether its transfers are direct. Raises `OSError`."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


class StoreInPlace(ReadableStore):
    """The tensors of one file that are in place, and the threads that read it."""

    file: FileInPlace

    def __init__(self, file: FileInPlace, readers: DiskThreads):
        super().__init__(readers)
        self.file = file

    def tensor(self, begin: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor whose entries begin at a byte of the file. Reads nothing. Raises `DiskError`."""
        return RangeInPlace(self, begin, shape.numel() * dtype.itemsize).tensor(shape, dtype)

    def check(self) -> None:
        super().check()
        self.file.check()


class RangeInPlace(StoredRange):
    """The place of one tensor in a file of the user: it begins within a page, and may end with the file."""

    is_in_place = True
    store: StoreInPlace

    def __init__(self, store: StoreInPlace, begin: int, size: int):
        self.shift = begin % PAGE
        super().__init__(store, begin - self.shift, whole_pages(self.shift + size))

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        try:
            self.memory = reserved(self.size)
        except OSError as error:
            raise DiskError(
                f"{self.store.file.path}: {error.strerror} while addresses for {self.size} bytes were reserved: raise the limit of virtual memory "
                "(ulimit -v)"
            ) from error
        self.store.file.map(ctypes.addressof(self.memory), self.start, self.size)
        found = torch.frombuffer(self.memory, dtype=dtype, count=shape.numel(), offset=self.shift).view(shape)
        self._belong_to(found.untyped_storage())
        return found

    def read(self, buffer: memoryview, start: int) -> None:
        """As `StoredRange.read`; pages that were written are those of the process."""
        is_own = self._written(start, len(buffer))
        if not is_own.all():
            self.store.file.read(buffer, self.start + start)
        self.store.check()
        if is_own.any():
            self._take_own(buffer, start, is_own.tolist())

    def bytes_to_read(self, start: int, size: int) -> int:
        """None if all of them were written."""
        return 0 if self._written(start, size).all() else size

    def _take_own(self, buffer: memoryview, start: int, is_own: list[bool]) -> None:
        at = 0
        for is_written, run in groupby(is_own):
            size = len(list(run)) * PAGE
            if is_written:
                into = (ctypes.c_uint8 * size).from_buffer(buffer, at)
                ctypes.memmove(into, self._begin + start + at, size)
            at += size

    def _written(self, start: int, size: int) -> torch.Tensor:
        return written_pages(self._begin + start, size, OF_FILES)

    @property
    def _begin(self) -> int:
        """The address of the first page."""
        return self._address - self.shift


def stores_in_place(paths: Iterable[Path]) -> Mapping[Path, StoreInPlace]:
    """Stores for files of the user. Those on one disk share the threads that read it. Raises `DiskError`."""
    files = {path: FileInPlace(path) for path in paths}
    devices = sorted({file.device for file in files.values()})
    readers = reader_threads(len(devices))
    for file in files.values():
        file.queue = devices.index(file.device)
    check_says_what_is_written(OF_FILES)  # raises here what a step would meet
    return {path: StoreInPlace(file, readers) for path, file in files.items()}
