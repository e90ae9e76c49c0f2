"""The folder of this user's entries on disk, trusted only if nobody else can write into it.

A planted entry would run as code (a library) or change numbers (a proof). The folder of Inductor's cache often has a name that
everybody can predict, below a folder that everybody can write into. Therefore everything from our own folder on is checked:

    <Inductor's cache>/l2l_compile_<user id>/      mode 0700, of this user, no link
        ab/abcdef.../                              one folder for each digest, likewise
            0123....json, 4567....so               of this user, not writable by others, no links

Checks and reads use one open file (`openat`, `O_NOFOLLOW`, `fstat`), so that nothing can be exchanged between them. Files are
written under another name and renamed. A folder whose entries take more than a limit loses those that were used longest ago.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TEMPORARY = "tmp-"
_ABANDONED = 3600.0  # seconds after which a temporary file belongs to a process that was killed
_USED_AGAIN = 3600.0  # seconds between two notes that an entry was used
_AFTER_PRUNING = 0.8  # share of the limit that is left
_MOST_BYTES = 1 << 28  # of one entry
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER = _READ_ONLY | getattr(os, "O_DIRECTORY", 0)


class FolderRefused(Exception):
    """The folder, or an entry, cannot be used. The message says why."""


@dataclass(frozen=True)
class Usage:
    """The number of entries in a folder, and their bytes."""

    entries: int
    bytes: int


def supported() -> bool:
    """Whether this system has users, and files that can be opened below an open folder."""
    return hasattr(os, "geteuid") and os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


class CacheFolder:
    """Entries by digest, in a folder of this user."""

    def __init__(self, base: Path):
        self.path = base / f"l2l_compile_{os.geteuid()}"

    def names(self, digest: str, suffix: str) -> list[str]:
        """The names of the entries of a digest, in order. Raises `FolderRefused`, or `OSError`, where they cannot be read."""
        try:
            with self._opened(digest) as folder:
                return sorted(name for name in os.listdir(folder) if name.endswith(suffix))
        except FileNotFoundError:
            return []

    def read(self, digest: str, name: str) -> bytes:
        """The content of an entry. Raises `FolderRefused` for one that another user could have written, or `OSError`."""
        with self._opened(digest) as folder, _file(name, folder) as file:
            _note_use(file)
            with os.fdopen(os.dup(file), "rb") as opened:
                return opened.read(_MOST_BYTES + 1)

    def write(self, digest: str, name: str, content: bytes) -> None:
        """Write an entry, as a whole or not at all. Raises `FolderRefused`, or `OSError`."""
        try:
            self._write(digest, name, content)
        except FileNotFoundError:  # another process has removed the empty folder since it was opened
            self._write(digest, name, content)

    def _write(self, digest: str, name: str, content: bytes) -> None:
        with self._opened(digest, make=True) as folder:
            temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def drop(self, digest: str, name: str) -> None:
        """Delete an entry, if it is there and can be deleted."""
        with suppress(OSError, FolderRefused), self._opened(digest) as folder:
            os.unlink(name, dir_fd=folder)

    def usage(self) -> Usage:
        """The number of entries, and their bytes. Raises `FolderRefused`, or `OSError`."""
        found = self._entries()
        return Usage(len(found), sum(entry.bytes for entry in found))

    def clear(self) -> Usage:
        """Delete all entries, and return how many there were. Raises `FolderRefused`, or `OSError`."""
        found = self._entries()
        for entry in found:
            self._remove(entry)
        return Usage(len(found), sum(entry.bytes for entry in found))

    def prune(self, limit: int) -> Usage:
        """Delete the entries that were used longest ago if all take more than `limit` bytes, and files of killed processes.

        Returns what was deleted. Other processes may do the same at once. Raises `FolderRefused`, or `OSError`.
        """
        found = self._entries()
        now, total = time.time(), sum(entry.bytes for entry in found)
        removed = [e for e in found if e.name.startswith(_TEMPORARY) and now - e.used > _ABANDONED]
        left = total - sum(entry.bytes for entry in removed)
        if left > limit:
            for entry in sorted(set(found) - set(removed), key=lambda entry: entry.used):
                if left <= limit * _AFTER_PRUNING:
                    break
                removed.append(entry)
                left -= entry.bytes
        for entry in removed:
            self._remove(entry)
        return Usage(len(removed), sum(entry.bytes for entry in removed))

    def _entries(self) -> list[_Entry]:
        found: list[_Entry] = []
        with suppress(FileNotFoundError), _folder(self.path) as root:
            for group in os.listdir(root):
                with suppress(OSError, FolderRefused), _folder(group, root) as inner:
                    for digest in os.listdir(inner):
                        with suppress(OSError, FolderRefused), _folder(digest, inner) as folder:
                            found += _entries_of(folder, digest)
        return found

    def _remove(self, entry: _Entry) -> None:
        self.drop(entry.digest, entry.name)
        with suppress(OSError, FolderRefused), _folder(self.path) as root, _folder(entry.digest[:2], root) as group:
            os.rmdir(entry.digest, dir_fd=group)  # if it was the last one of its digest

    @contextmanager
    def _opened(self, digest: str, make: bool = False) -> Iterator[int]:
        """The folder of a digest, open. With `make`, it is made."""
        with (
            _folder(self.path, make=make) as root,
            _folder(digest[:2], root, make=make) as group,
            _folder(digest, group, make=make) as folder,
        ):
            yield folder


@dataclass(frozen=True)
class _Entry:
    """A file of the folder: its bytes, and when it was used last, in seconds since 1970."""

    digest: str
    name: str
    bytes: int
    used: float


def _entries_of(folder: int, digest: str) -> Iterator[_Entry]:
    for name in os.listdir(folder):
        with suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield _Entry(digest, name, found.st_size, found.st_mtime)


@contextmanager
def _folder(name: str | Path, parent: int | None = None, make: bool = False) -> Iterator[int]:
    """A folder, open and checked. With `make`, it is made if it does not exist."""
    try:
        opened = _open_folder(name, parent)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(name, 0o700, dir_fd=parent)
        opened = _open_folder(name, parent)
    try:
        _check(os.fstat(opened), name)
        yield opened
    finally:
        os.close(opened)


def _open_folder(name: str | Path, parent: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FolderRefused(f"{name} is a link, or no folder") from error
        raise


@contextmanager
def _file(name: str, folder: int) -> Iterator[int]:
    """A file of a folder, open and checked."""
    try:
        opened = os.open(name, _READ_ONLY, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FolderRefused(f"{name} is a link") from error
        raise
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise FolderRefused(f"{name} is no file")
        _check(found, name)
        yield opened
    finally:
        os.close(opened)


def _check(found: os.stat_result, name: str | Path) -> None:
    """Raise `FolderRefused` for what another user owns or may write into."""
    if found.st_uid != os.geteuid():
        raise FolderRefused(f"{name} belongs to another user (id {found.st_uid}), who could change what it holds")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderRefused(f"others may write into {name} (mode {stat.S_IMODE(found.st_mode):04o})")


def _note_use(file: int) -> None:
    """Note that an entry was used, for `prune`; not more than once an hour, because each note is a write."""
    with suppress(OSError):
        if time.time() - os.fstat(file).st_mtime > _USED_AGAIN:
            os.utime(file)
