"""Whether anything has written into a private mapping of a file: the kernel then gives it pages of its own, and says so.

`/proc/self/pagemap` has 8 bytes for each page: https://docs.kernel.org/admin-guide/mm/pagemap.html
"""

from __future__ import annotations

import os

import torch

from l2l_compile.disk.disk_file import PAGE
from l2l_compile.errors import DiskError

_PATH = "/proc/self/pagemap"
_ENTRY = 8  # bytes
_AT_ONCE = 1 << 20  # bytes of entries
_OF_A_FILE, _SWAPPED = 1 << 61, 1 << 62  # and the sign bit: present


def is_written(address: int, size: int) -> bool:
    """Whether a page of `size` bytes from an address on, whole pages of a private mapping, is no longer one of its file. Raises `DiskError`."""
    first, count = address // PAGE * _ENTRY, size // PAGE * _ENTRY
    try:
        descriptor = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return any(
                _has_own_page(os.pread(descriptor, min(_AT_ONCE, count - at), first + at)) for at in range(0, count, _AT_ONCE)
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(
            f"{_PATH}: {error.strerror or error} while writes into the weights of a kept version were looked for: keep versions where this file may "
            "be read"
        ) from error


def _has_own_page(entries: bytes) -> bool:
    pages = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    is_own = ((pages < 0) & ((pages & _OF_A_FILE) == 0)) | ((pages & _SWAPPED) != 0)
    return bool(is_own.any())
