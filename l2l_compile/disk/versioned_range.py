"""A tensor in a file that keeps versions: its places there, which of them an update writes, and which one it is mapped to.

newest     the place that the tensor is mapped to
kept       places that a manifest names, or that the next one will name: no update writes them
the first other one    written by the next update; the tensor is mapped there when all of it has landed
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.disk.disk_file import RESUMES
from l2l_compile.disk.disk_store import DiskStore
from l2l_compile.disk.stored_range import StoredRange
from l2l_compile.errors import DiskError


@dataclass(frozen=True)
class StoredPlace:
    """Where a manifest finds a tensor: `size` bytes from byte `start` of the file on.

    before  where they were a step before, for a tensor whose values of that time are kept as well; None if they are the same
    """

    start: int
    size: int
    before: int | None = None

    @property
    def named(self) -> tuple[int, ...]:
        return (self.start,) if self.before is None else (self.start, self.before)


class StoreWithPlaces(DiskStore):
    """A store that says which places of its file are free, and which no update may write."""

    @abstractmethod
    def take_place(self, size: int) -> int:
        """A free place, which belongs to whoever asks. Raises `DiskError` on a full disk."""

    @abstractmethod
    def is_named(self, start: int) -> bool:
        """Whether the last manifest, or a version, names a place."""

    @abstractmethod
    def is_of_a_version(self, start: int) -> bool:
        """Whether a version names a place."""


class VersionedRange(StoredRange):
    """The places of one tensor, `size` bytes each, anywhere in the file.

    places      its own: where each begins, the newest one first
    before      the place of its values of a step before, while these are kept (`keep_before`)
    is_private  whether writes into the tensor stay in memory: its newest place belongs to a version
    """

    store: StoreWithPlaces

    def __init__(self, store: StoreWithPlaces, places: list[int], size: int):
        super().__init__(store, places[0], size)
        self.places = places
        self.before: int | None = None
        self.is_private = False
        self._keeps_before = False
        self._parts: list[
            tuple[int, int]
        ] = []  # of the place that is written, from and to, that have landed since the last commit
        self._guard = store.guard  # one lock for all that is said of places

    @property
    def newest(self) -> int:
        return self.places[0]

    def place_since(self, before: int | None) -> StoredPlace:
        """Where the tensor is, with the place of its values of a step before, if these are others."""
        with self._guard:
            return StoredPlace(self.newest, self.size, None if before == self.newest else before)

    @property
    def needed(self) -> int:
        """How many places it has to own, so that each step finds one to write."""
        with self._guard:
            of_versions = sum(map(self.store.is_of_a_version, self.places))
            return of_versions + (3 if self._keeps_before else 2)

    @property
    def to_keep(self) -> int:
        """How many more places a version takes that is made of its newest values."""
        named = self.place_since(self.before).named
        return sum(not self.store.is_of_a_version(start) for start in named)

    # ---- transfers -----------------------------------------------------------------------------------------------------

    def read(self, buffer: memoryview, start: int) -> None:
        at = 0
        for place, size in self._pieces(start, len(buffer)):
            self.store.file.read(buffer[at : at + size], place)
            at += size

    def write(self, buffer: memoryview, start: int) -> None:
        with self._guard:
            place = self._target()
        self.store.file.write(buffer, place + start)

    def blocks(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """As they are in the newest place: in another one, a block may be in other folders, or in two."""
        return self.store.file.blocks(self.newest + start, size)

    def _pieces(self, start: int, size: int) -> list[tuple[int, int]]:
        """Where in the file the newest bytes from `start` on are, one piece behind the other: where each begins, and its bytes."""
        with self._guard:
            target = self._target() if self._parts else self.newest
            found, at, end = [], start, start + size
            for first, last in sorted(self._parts):
                first, last = max(first, at), min(last, end)
                if first < last:
                    if at < first:
                        found.append((self.newest + at, first - at))
                    found.append((target + first, last - first))
                    at = last
            if at < end:
                found.append((self.newest + at, end - at))
            return found

    def landed(self, start: int, size: int) -> None:
        with self._guard:
            target = self._target()
            if target == self.newest:
                return
            self._parts.append((start, start + size))
            if _covered(self._parts) >= self.size:
                self._parts.clear()
                self.places.remove(target)
                self.places.insert(0, target)
                self.show()

    def _target(self) -> int:
        """The place that is written. One that is missing is made: the file grows then, which raises `DiskError` if the disk is full."""
        for start in self.places:
            if not self._is_kept(start):
                return start
        self.places.append(self.store.take_place(self.size))
        return self.places[-1]

    def _is_kept(self, start: int) -> bool:
        return start == self.before or self.store.is_named(start)

    # ---- the mapping ---------------------------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor, freed: deque[tuple[Sequence[int], int]]) -> None:
        super().hold(tensor, freed)
        self.show()

    @property
    def own_places(self) -> Sequence[int]:
        return self.places

    @property
    def address(self) -> int:
        """Of the tensor: it stays the same."""
        return self._address

    def show(self) -> None:
        """Map the tensor to its newest place. Raises `DiskError`."""
        if self.is_alive:
            self.is_private = self.store.is_of_a_version(self.newest)
            self.store.file.show(self._address, self.newest, self.size, is_private=self.is_private)

    def storage(self) -> torch.UntypedStorage | None:
        """The bytes of the tensor as a reader sees them; None if it is gone."""
        return self._storage() if self._storage is not None else None

    # ---- between two steps ---------------------------------------------------------------------------------------------

    def reserve_before(self) -> None:
        """Own a place for values of a step before as well. Raises `DiskError` on a full disk."""
        with self._guard:
            self._keeps_before = True
            self.make_room()

    def keep_before(self) -> None:
        """The newest values are those of a step before from now on: the next commit keeps them with those that an update writes."""
        self.reserve_before()
        self.before = self.newest

    def go_on(self, place: StoredPlace) -> None:
        """Keep what a manifest keeps of a tensor."""
        if place.before is not None:
            self.places.append(place.before)
            self.before, self._keeps_before = place.before, True

    def end_before(self) -> None:
        """Values of a step before are not kept any more."""
        with self._guard:
            self.before, self._keeps_before = None, False

    def drop_before(self) -> None:
        """Code of the user has written the newest values: there are no others."""
        with self._guard:
            if self.before is not None:
                self.before = self.newest

    def make_room(self, more: int = 0) -> None:
        """Own as many places as are needed, and some more. Raises `DiskError` on a full disk."""
        with self._guard:
            while len(self.places) < self.needed + more:
                self.places.append(self.store.take_place(self.size))

    def surplus(self) -> list[int]:
        """Places that it gives up: those of versions that have newer values, and those that are more than it needs."""
        with self._guard:
            others = [start for start in self.places[1:] if start != self.before]
            given = [start for start in others if self.store.is_of_a_version(start)]
            free = [start for start in others if not self.store.is_named(start)]
            more = len(self.places) - self.needed
            given += free[len(free) - max(0, min(more, len(free))) :]
            for start in given:
                self.places.remove(start)
            return given

    def check_whole(self) -> None:
        """Raise `DiskError` if a step has written some bytes of the tensor and not all."""
        if self._parts:
            raise DiskError(
                f"{self.store.file.folders[0]}: a step has written {_covered(self._parts)} of {self.size} bytes of a tensor, and is no complete "
                f"step. {RESUMES}"
            )


def _covered(parts: Sequence[tuple[int, int]]) -> int:
    """Bytes in any of these parts."""
    covered = end = 0
    for first, last in sorted(parts):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered
