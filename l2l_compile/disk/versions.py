"""A store whose last complete step outlives the process: each tensor has two places in a file with a name, or in one of each folder.

    place in the last manifest      read by whoever resumes; no update writes it
    the other place                 written by the next update; the tensor is mapped there when all of it has landed

A commit waits for the writes of a step, makes them durable, and writes a manifest with the newest places. Writes of the next step
wait for it: they go to the places that only the manifest before it names.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.disk.disk_file import RESUMES
from l2l_compile.disk.disk_store import DiskStore, StoredRange
from l2l_compile.disk.disk_threads import Block, DiskThreads, Transfer
from l2l_compile.disk.folder_lock import FolderLock
from l2l_compile.disk.manifest import read_manifest, write_manifest
from l2l_compile.disk.mapped_parts import Addresses
from l2l_compile.disk.run_files import DATA, HEADER, PartOfRun, check_parts, remove_parts
from l2l_compile.disk.striped_file import Extent, StripedFile
from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import taken


@dataclass(frozen=True)
class TwoPlaces:
    """Where a manifest finds a tensor: `size` bytes from byte `start` of the file on, which are there twice; the newest in place `newest`."""

    start: int
    size: int
    newest: int


class VersionedRange(StoredRange):
    """Two places of one tensor, `size` bytes each.

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

    def read(self, buffer: memoryview, start: int) -> None:
        at = 0
        for place, size in self._pieces(start, len(buffer)):
            self.store.file.read(buffer[at : at + size], self.start + start + at, place)
            at += size

    def write(self, buffer: memoryview, start: int) -> None:
        with self._guard:
            place = self._target
        self.store.file.write(buffer, self.start + start, place)

    def _pieces(self, start: int, size: int) -> list[tuple[int, int]]:
        """In which places the newest bytes from `start` on are, one piece behind the other, and the bytes of each piece."""
        with self._guard:
            found, at, end = [], start, start + size
            for first, last in sorted(self._parts):
                first, last = max(first, at), min(last, end)
                if first < last:
                    if at < first:
                        found.append((self.newest, first - at))
                    found.append((1 - self.newest, last - first))
                    at = last
            if at < end:
                found.append((self.newest, end - at))
            return found

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
        if self.is_alive:
            self.store.file.show(self._address, self.start, self.size, self.newest)

    def check_whole(self) -> None:
        """Raise `DiskError` if a step has written some bytes of the tensor and not all."""
        if self._parts:
            raise DiskError(
                f"{self.store.file.folders[0]}: a step has written {_covered(self._parts)} of {self.size} bytes of a tensor, and is no complete "
                f"step. {RESUMES}"
            )

    def commit(self) -> None:
        """The last manifest names the newest place."""
        with self._guard:
            self.committed = self.newest

    @property
    def _target(self) -> int:
        return 1 - self.newest if self.newest == self.committed else self.newest


def _covered(parts: Sequence[tuple[int, int]]) -> int:
    """Bytes in any of these parts."""
    covered = end = 0
    for first, last in sorted(parts):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered


class VersionedStore(DiskStore):
    """A file of tensors that has a name, with two places for each, and the manifest of the last complete step in the first folder.

    manifest  what the last process has left, None for a run that begins; `contents` is what it has handed to `begin_commit`
    """

    def __init__(self, *folders: str):
        self._locks = [FolderLock(folder) for folder in folders]
        self.manifest = read_manifest(folders[0])
        if self.manifest is None:
            remove_parts(folders)  # of a run that has ended before its first commit
        else:
            check_parts(folders, self.manifest)
        super().__init__(*folders)
        self._committer = DiskThreads(1, "disk-commit")
        self._commit: Transfer | None = None  # the one that was begun last
        self._bytes: dict[int, int] = {}  # of each place, by where it begins
        if self.manifest is None:
            self._id = uuid.uuid4().bytes
            for number, file in enumerate(self.file.files):
                PartOfRun(self._id, number, folders[0]).write(file)
        else:
            self._go_on(self.manifest)

    def _opened(self, folders: Sequence[str]) -> StripedFile:
        return StripedFile(folders, DATA, places=2, header=HEADER)

    @property
    def contents(self) -> Any:
        return None if self.manifest is None else self.manifest["contents"]

    def _go_on(self, manifest: dict[str, Any]) -> None:
        """Go on with the files that a manifest is of."""
        self._id = bytes.fromhex(manifest["id"])
        self.file.restore([Extent(*each) for each in manifest["extents"]])
        self._used = manifest["used"]
        self._bytes = {start: size for start, size, *_ in (*manifest["free"], *manifest["places"])}
        for start, size in manifest["free"]:
            self._free[size].append(start)

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

    def _memory_of(self, found: StoredRange) -> tuple[Addresses, int]:
        """Each tensor has its own, where it is shown in the one place and in the other."""
        return self.file.addresses(found.size), 0

    def _new_place(self, size: int) -> int:
        start = super()._new_place(size)
        self._bytes[start] = size
        return start

    def _place(self, size: int) -> int:
        """Those of a tensor that is gone are free in the commit of the next step."""
        return self._free[size].pop() if self._free[size] else self._new_place(size)

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
            sizes, used = dict(self._bytes), self._used
            extents = [tuple(extent) for extent in self.file.extents]
            end = self.file.end
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
                self.file.folders[0],
                {
                    "id": self._id.hex(),
                    "folders": [os.path.abspath(folder) for folder in self.file.folders],
                    "extents": extents,
                    "end": end,
                    "used": used,
                    "free": [(start, size) for start, size in sizes.items() if start not in named],
                    "places": [(place.start, place.size, place.newest) for place in places],
                    "contents": contents(places),
                },
            )
            for each in ranges:
                each.commit()
            with self._guard:
                self.written_bytes += size

        self._commit = self._committer.submit([Block(commit)], then=self._note_commit)

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
