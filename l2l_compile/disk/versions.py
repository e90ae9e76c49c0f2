"""A store whose last complete step outlives the process, and versions before it that are kept under names. Its files have names.

    places that the last manifest names     read by whoever resumes; no update writes them
    places that a version names             the same, until the version is dropped
    other places                            written by the next update

A commit waits for the writes of a step, makes them durable, and writes a manifest with the newest places. Writes of the next step
wait for it: they go to places that only the manifest before it names. To keep a version is to write this manifest a second time,
and to give each tensor a further place. Among several ranks, a manifest replaces the one before when all ranks have prepared theirs.
"""

from __future__ import annotations

import ctypes
import os
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from l2l_compile.disk.disk_threads import DiskBlock, DiskThreads, Transfer
from l2l_compile.disk.found_run import FoundRun, unknown
from l2l_compile.disk.manifest import confirm_manifest, remove_manifest, write_manifest
from l2l_compile.disk.run_files import DATA, HEADER, PartOfRun, remove_parts
from l2l_compile.disk.stored_range import StoredRange, StoredSpan
from l2l_compile.disk.striped_file import BLOCK, Extent, StripedFile
from l2l_compile.disk.versioned_range import StoredPlace, StoreWithPlaces, VersionedRange
from l2l_compile.disk.written_pages import OF_A_VERSION, check_says_what_is_written, is_written
from l2l_compile.memory.finalizers import members, taken
from l2l_compile.memory.pages import huge_pages

_DROP = ", or drop a version (l2l_compile.drop_version)"


class VersionedStore(StoreWithPlaces):
    """A file of tensors that has a name, with two places or more for each, and manifests beside it: in the first folder, of several.

    manifest  where this process begins: of the last complete step that the process before has left, or of a version; None for a run that
              begins. `contents` is what was handed to `begin_commit`
    """

    def __init__(self, *folders: str, version: str | None = None, found: FoundRun | None = None):
        """`found` is what these folders have, if its files were checked and settled."""
        if found is None:
            found = FoundRun(folders, version)
            found.check_parts()
        self._locks, self._among, self._rank = found.locks, found.among, found.rank
        folders, last, self.manifest = found.folders, found.last, found.begin
        if last is None:
            remove_parts(folders)  # of a run that has ended before its first commit
        super().__init__(*folders, failed=self._among.failed if self._among is not None else lambda _: None)
        self._committer = DiskThreads(1, "disk-commit")
        self._commit: Transfer | None = None  # the one that was begun last
        self._last = last  # the last manifest
        self._commits = 0 if last is None else last["commits"]  # that were begun, of the whole run
        self._space: dict[int, int] = {}  # all places: where each begins, and its bytes
        self._named: frozenset[int] = frozenset()  # by the last manifest
        self._versions: dict[str, frozenset[int]] = {}  # by name, the places of each
        self._of_versions: frozenset[int] = frozenset()  # of all of them
        self._loose: dict[int, int] = {}  # places of no tensor that are not free yet, and the bytes of each
        self._ranges: weakref.WeakSet[VersionedRange] = weakref.WeakSet()
        self._found: dict[int, VersionedRange] = {}  # of the manifest in which this process begins, by the newest place
        if last is None:
            self._id = uuid.uuid4().bytes if self._among is None else bytes.fromhex(self._among.name)
            for number, file in enumerate(self.file.files):
                PartOfRun(self._id, number, folders[0], self._rank).write(file)
        else:
            assert self.manifest is not None
            self._go_on(last, found.versions, self.manifest)

    def _opened(self, folders: Sequence[str]) -> StripedFile:
        return StripedFile(folders, DATA, header=HEADER)

    @property
    def contents(self) -> Any:
        return None if self.manifest is None else self.manifest["contents"]

    def _go_on(self, last: dict[str, Any], versions: dict[str, dict[str, Any]], begin: dict[str, Any]) -> None:
        """Go on with the files that the last manifest is of. Raises `DiskError` on a full disk."""
        self._id = bytes.fromhex(last["id"])
        self.file.restore([Extent(*each) for each in last["extents"]])
        self._used, self._space = last["used"], dict(last["space"])
        self._named = _named_by(last)
        self._set_versions({name: _named_by(each) for name, each in versions.items()})
        of_begin = _named_by(begin)
        for start, size in self._space.items():
            if start in of_begin:
                continue
            if self.is_named(start):
                self._loose[start] = size
            else:
                self._free[size].append(start)
        for place in begin["places"]:
            self._begin_at(StoredPlace(*place))

    def _begin_at(self, place: StoredPlace) -> None:
        """Own the places of a tensor where this process begins, and those that its next steps need."""
        found = VersionedRange(self, [place.start], place.size)
        found.go_on(place)
        found.places.append(self.take_place(place.size))
        of_last = [s for s, size in self._loose.items() if size == place.size and s not in self._of_versions]
        for start in of_last[: max(0, found.needed - len(found.places))]:  # free when the first step is committed
            del self._loose[start]
            found.places.append(start)
        found.make_room()
        self._found[place.start] = found

    # ---- tensors -------------------------------------------------------------------------------------------------------

    def again(self, place: StoredPlace, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor at a place of the manifest where this process begins. Reads nothing of it."""
        with self.guard:
            return self._held(shape, dtype, self._found.pop(place.start))

    def before(self, place: StoredPlace, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """The values that a tensor had a step before, as far as a manifest keeps them: valid until the next step is over."""
        if place.before is None:
            return None
        memory = self.file.addresses(place.size)
        self.file.show(ctypes.addressof(memory), place.before, place.size, is_private=True)
        return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape)

    def _range(self, start: int, size: int) -> StoredRange:
        found = VersionedRange(self, [start], size)
        found.make_room()
        return found

    def _held(self, shape: torch.Size, dtype: torch.dtype, found: StoredRange) -> torch.Tensor:
        """Addresses are those of memory without a file: a place of the file may belong to one tensor after another."""
        assert isinstance(found, VersionedRange)
        found.memory = self.file.addresses(found.size)
        tensor = torch.frombuffer(found.memory, dtype=dtype, count=shape.numel()).view(shape)
        found.hold(tensor, self._freed)
        self._ranges.add(found)
        return tensor

    def _place(self, size: int) -> int:
        return self.take_place(size)

    def take_place(self, size: int) -> int:
        """A free place. That of a tensor that is gone is free in the commit of the next step. Raises `DiskError`."""
        with self.guard:
            if self._free[size]:
                return self._free[size].pop()
            start = self._new_place(size)
            self._space[start] = size
            return start

    def is_named(self, start: int) -> bool:
        return start in self._named or start in self._of_versions

    def is_of_a_version(self, start: int) -> bool:
        return start in self._of_versions

    # ---- commits -------------------------------------------------------------------------------------------------------

    def before_writes(self) -> Callable[[], None]:
        """Wait for the commit of the step before. If it has failed, write nothing: the last manifest still holds."""
        self.refuse_in_a_fork()
        commit = self._commit

        def wait() -> None:
            if commit is not None:
                commit.settle()
            self.check()

        return wait

    def begin_commit(self, ranges: Sequence[VersionedRange], contents: Callable[[list[StoredPlace]], Any]) -> None:
        """Commit a step whose writes were all given, and none of the next step. `ranges` are its tensors; `contents` gets their places.

        A disk thread does it. If it fails, `check` raises the error, and no later write begins.
        """
        self.refuse_in_a_fork()
        with self.guard:
            # A write that goes to such a place from now on waits for this commit.
            self._free_what_is_loose({start for each in ranges for start in each.places})
            space, used = list(self._space.items()), self._used
            extents, end = [tuple(each) for each in self.file.extents], self.file.end
        self._commits = commits = self._commits + 1
        pending = self._writers.under_way
        before = [each.before for each in ranges]  # the next step may begin before the places are known

        def commit() -> None:
            for transfer in pending:
                transfer.wait()
            self.check()
            for each in ranges:
                each.check_whole()
            places = [each.place_since(start) for each, start in zip(ranges, before, strict=True)]
            self.file.sync()
            manifest = {
                "id": self._id.hex(),
                "rank": tuple(self._rank),
                "commits": commits,
                "folders": [os.path.abspath(each) for each in self.file.folders],
                "extents": extents,
                "end": end,
                "used": used,
                "space": space,
                "places": [(place.start, place.size, place.before) for place in places],
                "contents": contents(places),
            }
            self._write_manifest(manifest)
            with self.guard:
                self._last, self._named = manifest, _named_by(manifest)
                self._trim()

        self._commit = self._committer.submit([DiskBlock(commit)], then=self._note_commit)

    def _write_manifest(self, manifest: dict[str, Any], version: str | None = None) -> None:
        """Replace a manifest, durably: among several ranks, when all of them have prepared theirs. Raises `DiskError`, and `RankError`."""
        folder = self.file.folders[0]
        size = write_manifest(folder, manifest, version, is_prepared=self._among is not None)
        if self._among is not None:
            self._among.all_have("a step" if version is None else "a version")
            confirm_manifest(folder, version)
        with self.guard:
            self.written_bytes += size

    def await_commit(self) -> None:
        """Wait until the commit that was begun last is done. Raises `DiskError`."""
        if self._commit is not None:
            self._commit.settle()
        self.check()

    def _note_commit(self, transfer: Transfer) -> None:
        self._note(transfer, ())

    def _free_what_is_loose(self, named: Container[int]) -> None:
        """Free the places of no tensor that neither `named` nor a version has."""
        for starts, size in list(taken(self._freed)):
            self._loose.update(dict.fromkeys(starts, size))
        for start, size in list(self._loose.items()):
            if start not in named and start not in self._of_versions:
                del self._loose[start]
                self._free[size].append(start)

    def _living(self) -> list[VersionedRange]:
        """The ranges of tensors that are there. The places of others are loose, or noted as such."""
        return [each for each in members(self._ranges) if each.is_alive]

    def _trim(self) -> None:
        for each in self._living():
            self._loose.update(dict.fromkeys(each.surplus(), each.size))

    # ---- versions ------------------------------------------------------------------------------------------------------

    def make_room_for_a_version(self) -> None:
        """A further place for each tensor that a version is to keep. No write is under way.

        Raises `DiskError` if a disk, of any rank, is full: nothing is changed.
        """
        if self._among is None:
            self._make_room()
        else:
            self._among.together(self._make_room)

    def _make_room(self) -> None:
        check_says_what_is_written(OF_A_VERSION)
        with self.guard:
            ranges = self._living()
            needed = Counter[int]()
            for each in ranges:
                needed[each.size] += max(0, each.needed + each.to_keep - len(each.places))
            missing = sum(size * max(0, count - len(self._free[size])) for size, count in needed.items())
            self.file.extend(self._used + missing, _DROP)
            for each in ranges:
                each.make_room(each.to_keep)

    def keep(self, version: str) -> None:
        """Keep the last complete step under a name, in the place of one that has it. No update is under way. Raises `DiskError`."""
        self.await_commit()
        assert self._last is not None, "a step was committed"
        self._write_manifest(self._last, version)
        with self.guard:
            self._set_versions({**self._versions, version: _named_by(self._last)})
            for each in self._living():
                if self.is_of_a_version(each.newest) and not each.is_private:
                    each.show()
            self._trim()
            self._free_what_is_loose(self._named)

    def carry_writes(self) -> None:
        """Give tensors whose newest place belongs to a version a place of their own if code of the user has written into them.

        Before this, such writes are in memory alone, and neither updates nor fetches would see them. No update of these tensors is under
        way. Raises `DiskError`.
        """
        for each in self._living():
            memory = each.storage() if each.is_private else None
            if memory is None or not is_written(each.address, each.size):
                continue
            buffer = huge_pages(min(BLOCK, each.size), "weights that were written behind a kept version")
            for at in range(0, each.size, BLOCK):
                size = min(BLOCK, each.size - at)
                ctypes.memmove(buffer.data_ptr(), each.address + at, size)
                self.write([StoredSpan(each, at, size, 0)], buffer).wait()

    def drop(self, version: str) -> None:
        """Use the places of a version again, but for those that another one or the last complete step has. Raises `DiskError`."""
        self.refuse_in_a_fork()
        self.await_commit()
        if version not in self._versions:
            raise unknown(self.file.folders[0], version, self._versions)
        remove_manifest(self.file.folders[0], version)
        with self.guard:
            self._set_versions({name: places for name, places in self._versions.items() if name != version})
            self._trim()
            self._free_what_is_loose(self._named)

    def _set_versions(self, versions: dict[str, frozenset[int]]) -> None:
        self._versions, self._of_versions = versions, frozenset().union(*versions.values())


def _named_by(manifest: dict[str, Any]) -> frozenset[int]:
    return frozenset(start for place in manifest["places"] for start in StoredPlace(*place).named)
