"""Which pages of a private mapping of a file anything has written: the kernel then gives it pages of its own, and says so.

`/proc/self/pagemap` has 8 bytes for each page: https://docs.kernel.org/admin-guide/mm/pagemap.html
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from l2l_compile.disk.disk_file import PAGE
from l2l_compile.errors import DiskError

_PATH = "/proc/self/pagemap"
_ENTRY = 8  # bytes
_AT_ONCE = 1 << 20  # bytes of entries
_OF_A_FILE, _SWAPPED = 1 << 61, 1 << 62  # and the sign bit: present
OF_A_VERSION = "writes into the weights of a kept version were looked for: keep versions where this file may be read"
OF_FILES = "writes into weights in place were looked for: leave out in_place=True where this file may not be read"


def is_written(address: int, size: int, remedy: str = OF_A_VERSION) -> bool:
    """Whether a page of `size` bytes from an address on, whole pages of a private mapping, is no longer one of its file. Raises `DiskError`."""
    pages = range(address, address + size, _AT_ONCE // _ENTRY * PAGE)
    return any(written_pages(first, min(pages.step, address + size - first), remedy).any() for first in pages)


def written_pages(address: int, size: int, remedy: str = OF_A_VERSION) -> torch.Tensor:
    """Of each page, whether it is no longer one of its file. Raises `DiskError`, whose sentence ends with `remedy`."""
    try:
        descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(descriptor, size // PAGE * _ENTRY, address // PAGE * _ENTRY)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(f"{_PATH}: {error.strerror or error} while {remedy}") from error
    if entries == bytes(len(entries)):  # nothing has looked into the mapping, as where a device has the weights: quickly said
        return torch.zeros(size // PAGE, dtype=torch.bool)
    pages = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    return ((pages < 0) & ((pages & _OF_A_FILE) == 0)) | ((pages & _SWAPPED) != 0)


def check_says_what_is_written(remedy: str) -> None:
    """Raise `DiskError` where the system does not say which pages are written, so that writes would be missed in silence."""
    descriptor = os.memfd_create("l2l-page", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, PAGE)
        with mmap.mmap(descriptor, PAGE, flags=mmap.MAP_PRIVATE) as page:
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            page[0]
            before = is_written(address, PAGE, remedy)
            page[0] = 1
            after = is_written(address, PAGE, remedy)
    finally:
        os.close(descriptor)
    if before or not after:
        raise DiskError(f"{_PATH} does not show a write into a page: no answer while {remedy}")
