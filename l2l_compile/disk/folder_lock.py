"""A lock on a folder: one process trains there. The kernel gives it back however the process ends."""

from __future__ import annotations

import fcntl
import os
import socket
import weakref

from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import members

_NAME = "l2l-store.lock"
_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """Keeps other processes out of a folder until it is gone. Raises `DiskError` with the process that has the folder."""

    def __init__(self, folder: str):
        path = os.path.join(folder, _NAME)
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DiskError(
                f"{path}: {error.strerror or error} while the lock of this folder was opened: give the option 'disk' a folder that exists and may "
                "be written"
            ) from error
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # a disk thread may still write
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self.descriptor, 200, 0).decode(errors="replace") or "another process"
            owner = "a model of this process" if owner == _this_process() else owner
            raise DiskError(
                f"{folder}: {owner} trains in this folder (option 'resumable'): end it, or give the option 'disk' another folder"
            ) from error
        except OSError as error:
            raise DiskError(
                f"{path}: {error.strerror or error} while the folder was locked, which option 'resumable' needs"
            ) from error
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, _this_process().encode(), 0)
        _locks.add(self)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _after_fork() -> None:
    """Leave the lock to the parent: a forked process that outlives it would keep its folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for lock in members(_locks):
        os.dup2(nothing, lock.descriptor, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
