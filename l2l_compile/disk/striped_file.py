"""A file that is striped over folders: each has a file of its own, so that disks work at the same time, and their rates add up.

striped file     | 0 | 1 | 2 | 3 | 4 | 5 | ...    stripes, of 1 MiB to 8 MiB
first folder     | 0 | 2 | 4 | ...
second folder    | 1 | 3 | 5 | ...
"""

from __future__ import annotations

import bisect
import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from l2l_compile.disk.disk_file import DiskFile
from l2l_compile.disk.mapped_parts import Addresses, map_part, reserved
from l2l_compile.errors import DiskError
from l2l_compile.user_line import warn

BLOCK = 8 << 20  # bytes of one transfer: with smaller ones, a disk is as fast, and the processor busier
_SMALLEST = 1 << 20  # bytes of a stripe
_ROUNDS = 16  # stripes in each folder, before they are larger than the smallest
_MOST = 1 << 14  # stripes: each takes one of the 65,530 mappings that a process may have


class Part(NamedTuple):
    """Bytes of a striped file that are in one file: its number, where they begin in it, and how many they are."""

    number: int
    offset: int
    size: int


class Extent(NamedTuple):
    """Bytes that were allocated together.

    start   in the striped file
    stripe  bytes of a stripe
    begin   where they begin in the file of each folder, and `share` bytes of them are there
    """

    start: int
    stripe: int
    begin: int
    share: int


class StripedFile:
    """Files in folders as one file. Offsets and sizes are multiples of a page.

    folders  with at least one entry
    name     of the file in each folder; None for files without a name
    header   bytes at the beginning of each file that belong to no extent
    size     bytes that are allocated
    """

    def __init__(self, folders: Sequence[str], name: str | None = None, header: int = 0):
        self.folders, self._header = tuple(folders), header
        self.files = [DiskFile(folder, name) for folder in folders]
        for file in self.files:
            file.probe()
            file.extend(header)
        _warn_of_one_device(self.folders)
        self.size = 0
        self.extents: list[Extent] = []

    def extend(self, size: int, remedy: str = "") -> None:
        """Allocate `size` bytes in all, the same share in each folder. Raises `DiskError`, as `DiskFile.extend`."""
        missing, count = size - self.size, len(self.files)
        if missing <= 0:
            return
        stripe = _stripe(missing, count)
        share = -(-missing // (stripe * count)) * stripe
        made = Extent(self.size, stripe, self.end, share)
        for file in self.files:
            file.extend(self._end_of(made), remedy)
        self._add(made)

    def restore(self, extents: Sequence[Extent]) -> None:
        """Go on with a file that was allocated by another process."""
        for extent in extents:
            self._add(extent)

    @property
    def end(self) -> int:
        """Where the extents end in the file of each folder."""
        return self._end_of(self.extents[-1]) if self.extents else self._header

    def parts(self, start: int, size: int) -> Iterator[Part]:
        """Where bytes are, in order."""
        end = start + size
        while start < end:
            extent = self.extents[bisect.bisect_right(self.extents, start, key=lambda each: each.start) - 1]
            number, within = divmod(start - extent.start, extent.stripe)
            row, column = divmod(number, len(self.files))
            part = min(extent.stripe - within, end - start)
            yield Part(column, extent.begin + row * extent.stripe + within, part)
            start += part

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Bytes in transfers of at most `BLOCK`, each in one folder: the number of the folder, which byte is the first, and how many."""
        at = 0
        for part in self.parts(start, size):
            for first in range(0, part.size, BLOCK):
                yield part.number, at + first, min(BLOCK, part.size - first)
            at += part.size

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of whole pages. Raises `DiskError`."""
        for part, piece in self._pieces(buffer, start):
            self.files[part.number].read(piece, part.offset)

    def write(self, buffer: memoryview, start: int) -> None:
        """Write a buffer of whole pages. Raises `DiskError`."""
        for part, piece in self._pieces(buffer, start):
            self.files[part.number].write(piece, part.offset)

    def mapped(self, start: int, size: int) -> Addresses:
        """Memory that shows bytes, as long as the result is there. Raises `DiskError`."""
        found = self.addresses(size)
        self.show(ctypes.addressof(found), start, size)
        return found

    def addresses(self, size: int) -> Addresses:
        """Addresses for `show`. Raises `DiskError`."""
        try:
            return reserved(size)
        except OSError as error:
            raise DiskError(
                f"{self.folders[0]}: {error.strerror} while addresses for {size} bytes were reserved: raise the limit of virtual memory (ulimit -v)"
            ) from error

    def show(self, address: int, start: int, size: int, *, is_private: bool = False) -> None:
        """Map bytes to addresses: writes there go into the files, or stay in memory. Raises `DiskError`."""
        for number, offset, part in self.parts(start, size):
            try:
                map_part(address, part, self.files[number].descriptor, offset, is_private=is_private)
            except OSError as error:
                raise self.files[number].not_mapped(error, offset, part) from error
            address += part

    def sync(self) -> None:
        """Return when all bytes that were written are on the devices. Raises `DiskError`."""
        for file in self.files:
            file.sync()

    def _add(self, extent: Extent) -> None:
        self.extents.append(extent)
        self.size = extent.start + extent.share * len(self.files)

    def _end_of(self, extent: Extent) -> int:
        return extent.begin + extent.share

    def _pieces(self, buffer: memoryview, start: int) -> Iterator[tuple[Part, memoryview]]:
        at = 0
        for part in self.parts(start, len(buffer)):
            yield part, buffer[at : at + part.size]
            at += part.size


def _stripe(size: int, folders: int) -> int:
    """Bytes of a stripe of an extent: with few stripes, folders would take turns; of many, mappings would be too many."""
    if folders == 1:
        return size
    stripe = _SMALLEST
    while 2 * stripe <= BLOCK and 2 * stripe * folders * _ROUNDS <= size:
        stripe *= 2
    while stripe * _MOST < size:
        stripe *= 2
    return stripe


def _warn_of_one_device(folders: Sequence[str]) -> None:
    devices = Counter(map(_device_of, folders))
    together = [folder for folder in folders if devices[_device_of(folder)] > 1]
    if together:
        warn(
            f"backend 'l2l': {' and '.join(together)}, folders of option 'disk', are on one device, so that their rates do not add up: give it a "
            "folder on each disk"
        )


def _device_of(folder: str) -> int:
    return os.stat(folder).st_dev
