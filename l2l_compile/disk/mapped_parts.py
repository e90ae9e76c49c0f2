"""Memory that shows parts of files: addresses are reserved first, and each part of them is mapped to a file then, as often as it moves."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Addresses = ctypes.Array  # of bytes, as a buffer that `torch.frombuffer` takes


def reserved(size: int) -> Addresses:
    """Addresses without memory, until this array is gone. Raises `OSError`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mapped(None, size, 0, flags, -1, 0)  # 0: neither read nor written, so that no limit of memory counts them
    found = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(found, _libc.munmap, address, size).atexit = False  # a disk thread may still use it
    return found


def map_part(address: int, size: int, descriptor: int, offset: int, *, is_private: bool = False) -> None:
    """Map bytes of a file to addresses that are reserved, in place of what is mapped there. Writes into a private mapping stay in memory.

    Raises `OSError`.
    """
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if is_private else mmap.MAP_SHARED
    _mapped(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, offset)


def _mapped(address: int | None, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, descriptor, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
