"""A store whose last complete step outlives the process: each tensor has two places in a file with a name.

    place in the last manifest      read by whoever resumes; no update writes it
    the other place                 written by the next update; the tensor is mapped there when all of it has landed

A commit waits for the writes of a step, makes them durable, and writes a manifest with the newest places. Writes of the next step
wait for it: they go to the places that only the manifest before it names.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.disk.disk_file import PAGE, PROBED, RESUMES
from l2l_compile.disk.disk_store import DiskStore, StoredRange
from l2l_compile.disk.disk_threads import DiskThreads, Transfer
from l2l_compile.disk.folder_lock import FolderLock
from l2l_compile.disk.manifest import path_of_manifest, read_manifest, write_manifest
from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import taken
from l2l_compile.units import format_bytes

DATA = "l2l-store.bin"
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


@dataclass(frozen=True)
class TwoPlaces:
    """Where a manifest finds a tensor: two places of `size` bytes from byte `start` of the file on; the tensor is in number `newest`."""

    start: int
    size: int
    newest: int


class VersionedRange(StoredRange):
    """Two places of one tensor, `size` bytes each, one behind the other.

    newest     the number of the place that the tensor is mapped to
    committed  the number of the place that the last manifest names; None if it has no place of this tensor
    """

    def __init__(self, store: DiskStore, start: int, size: int, newest: int = 0, committed: int | None = None):
        super().__init__(store, start, size)
        self.newest, self.committed = newest, committed
        self._parts: list[tuple[int, int]] = []  # of the other place, from and to, that have landed since the last commit
        self._guard = threading.RLock()

    @property
    def place(self) -> TwoPlaces:
        return TwoPlaces(self.start, self.size, self.newest)

    def pieces(self, start: int, size: int) -> list[tuple[int, int]]:
        with self._guard:
            found, at, end = [], start, start + size
            for first, last in sorted(self._parts):
                first, last = max(first, at), min(last, end)
                if first < last:
                    if at < first:
                        found.append((self._offset(self.newest) + at, first - at))
                    found.append((self._offset(1 - self.newest) + first, last - first))
                    at = last
            if at < end:
                found.append((self._offset(self.newest) + at, end - at))
            return found

    def offset_to_write(self, start: int) -> int:
        with self._guard:
            return self._offset(self._target) + start

    def landed(self, start: int, size: int) -> None:
        with self._guard:
            if self._target == self.newest:
                return
            self._parts.append((start, start + size))
            if _covered(self._parts) >= self.size:
                self._parts.clear()
                self.newest = 1 - self.newest
                self.show()

    def show(self) -> None:
        """Map the tensor to its newest place. Its address stays the same. Raises `DiskError`."""
        if not self.is_alive:
            return
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        file, offset = self.store.file, self._offset(self.newest)
        found = _libc.mmap(self._address, self.size, protection, mmap.MAP_SHARED | _MAP_FIXED, file.descriptor, offset)
        if found == _MAP_FAILED:
            raise DiskError(
                f"{file.folder}: {os.strerror(ctypes.get_errno())} while {self.size} bytes at byte {offset} were mapped: raise vm.max_map_count "
                f"above the number of tensors. {RESUMES}"
            )

    def check_whole(self) -> None:
        """Raise `DiskError` if a step has written some bytes of the tensor and not all."""
        if self._parts:
            raise DiskError(
                f"{self.store.file.folder}: a step has written {_covered(self._parts)} of {self.size} bytes of a tensor, and is no complete step. "
                f"{RESUMES}"
            )

    def commit(self) -> None:
        """The last manifest names the newest place."""
        with self._guard:
            self.committed = self.newest

    @property
    def _target(self) -> int:
        return 1 - self.newest if self.newest == self.committed else self.newest

    def _offset(self, number: int) -> int:
        return self.start + number * self.size


def _covered(parts: Sequence[tuple[int, int]]) -> int:
    """Bytes in any of these parts."""
    covered = end = 0
    for first, last in sorted(parts):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered


class VersionedStore(DiskStore):
    """A file of tensors that has a name, with two places for each, and the manifest of the last complete step beside it.

    manifest  what the last process has left, None for a run that begins; `contents` is what it has handed to `begin_commit`
    """

    def __init__(self, folder: str):
        self._lock = FolderLock(folder)
        self.manifest = read_manifest(folder)
        path = os.path.join(folder, DATA)
        if self.manifest is None:
            _remove(path)  # of a run that has ended before its first commit
        elif not os.path.exists(path):
            raise _not_of(folder, "is missing")
        super().__init__(folder, DATA)
        self._committer = DiskThreads(1, "disk-commit")
        self._commit: Transfer | None = None  # the one that was begun last
        self._pairs: dict[int, int] = {}  # all pairs of places: where each begins, and the bytes of one
        if self.manifest is None:
            self._id = uuid.uuid4().bytes
            self.file.extend(PROBED + PAGE)
            self.file.write(_page(self._id), PROBED)
            self._used = PROBED + PAGE
        else:
            self._open(self.manifest)

    @property
    def contents(self) -> Any:
        return None if self.manifest is None else self.manifest["contents"]

    def _open(self, manifest: dict[str, Any]) -> None:
        """Go on with the file that a manifest is of. Raises `DiskError` for another one."""
        if self.file.size < manifest["size"]:
            raise _not_of(self.file.folder, f"has {format_bytes(self.file.size)} in place of {format_bytes(manifest['size'])}")
        page = _page(b"")
        self.file.read(page, PROBED)
        self._id = bytes(page[:16])
        if self._id.hex() != manifest["id"]:
            raise _not_of(self.file.folder, "is of another run")
        self._used = manifest["used"]
        self._pairs = {start: size for start, size, *_ in (*manifest["free"], *manifest["places"])}
        for start, size in manifest["free"]:
            self._free[size].append(start)

    def reserve(self, size: int, remedy: str = "") -> None:
        super().reserve(2 * size, remedy)

    def again(self, place: TwoPlaces, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the last manifest has at a place. Reads nothing of it."""
        with self._guard:
            return self._held(shape, dtype, VersionedRange(self, place.start, place.size, place.newest, place.newest))

    def _range(self, start: int, size: int) -> StoredRange:
        return VersionedRange(self, start, size)

    def _held(self, shape: torch.Size, dtype: torch.dtype, found: StoredRange) -> torch.Tensor:
        assert isinstance(found, VersionedRange)
        tensor = super()._held(shape, dtype, found)
        found.show()
        return tensor

    def _mapping(self, start: int, end: int) -> tuple[int, mmap.mmap]:
        """One mapping of the whole file: a run that is resumed maps tensors in another order than they were allocated in."""
        return super()._mapping(0, end)

    def _place(self, size: int) -> int:
        """Two free places. Those of a tensor that is gone are free in the commit of the next step."""
        if self._free[size]:
            return self._free[size].pop()
        start = self._new_place(2 * size)
        self._pairs[start] = size
        return start

    def before_writes(self) -> Callable[[], None]:
        """Wait for the commit of the step before. If it has failed, write nothing: the last manifest still holds."""
        commit = self._commit

        def wait() -> None:
            if commit is not None:
                commit.settle()
            self.check()

        return wait

    def begin_commit(self, ranges: Sequence[VersionedRange], contents: Callable[[list[TwoPlaces]], Any]) -> None:
        """Commit a step whose writes were all given, and none of the next step. `ranges` are its tensors; `contents` gets their places.

        A disk thread does it. If it fails, `check` raises the error, and no later write begins.
        """
        with self._guard:
            self._free_what_is_gone({each.start for each in ranges})
            pairs, used = dict(self._pairs), self._used
        pending = self._writers.under_way

        def commit() -> None:
            for transfer in pending:
                transfer.wait()
            self.check()
            for each in ranges:
                each.check_whole()
            places = [each.place for each in ranges]
            self.file.sync()
            named = {place.start for place in places}
            size = write_manifest(
                self.file.folder,
                {
                    "id": self._id.hex(),
                    "size": self.file.size,
                    "used": used,
                    "free": [(start, size) for start, size in pairs.items() if start not in named],
                    "places": [(place.start, place.size, place.newest) for place in places],
                    "contents": contents(places),
                },
            )
            for each in ranges:
                each.commit()
            with self._guard:
                self.written_bytes += size

        self._commit = self._committer.submit([commit], then=self._note_commit)

    def _free_what_is_gone(self, named: Container[int]) -> None:
        """Free the places of tensors that are gone, but for those that the next manifest names.

        The last manifest may name these places. A write that goes there from now on waits for the next one.
        """
        for start, size in list(taken(self._freed)):
            if start in named:
                self._freed.append((start, size))
            else:
                self._free[size].append(start)

    def await_commit(self) -> None:
        """Wait until the commit that was begun last is done. Raises `DiskError`."""
        if self._commit is not None:
            self._commit.settle()
        self.check()

    def _note_commit(self, transfer: Transfer) -> None:
        self._note(transfer, ())


def _page(content: bytes) -> memoryview:
    page = mmap.mmap(-1, PAGE)
    page[: len(content)] = content
    return memoryview(page)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskError(
            f"{path}: {error.strerror or error} while the file of a run without a complete step was removed"
        ) from error


def _not_of(folder: str, found: str) -> DiskError:
    return DiskError(
        f"{folder}: {DATA} {found}, so {path_of_manifest(folder)} is not of it: put back both files, or remove all files l2l-store.* to begin anew"
    )
