"""What folders have of a run, found before anything in them is changed. Ranks find a part each, and agree on the step that all of them have.

    /nvme/run7/rank-0/l2l-store.*    the part of rank 0
    /nvme/run7/rank-1/l2l-store.*    the part of rank 1

A rank prepares the manifest of a step, waits until all have prepared theirs, and only then has it replace the one before. No place that the
step before names is written until then. So a kill leaves each rank with one of two steps that follow each other, and at least one of
these is on all ranks.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from l2l_compile.disk.folder_lock import FolderLock
from l2l_compile.disk.manifest import (
    confirm_manifest,
    names_of_versions,
    path_of_manifest,
    read_manifest,
    remove_manifest,
    sync_folder,
)
from l2l_compile.disk.run_files import ALONE, PartOfRun, RankOfRun, check_parts, rank_of
from l2l_compile.errors import DiskError, L2LError
from l2l_compile.ranks.agreement import Agreement

_LAST = ""  # in place of the name of a version: the last complete step
_ANEW = "or remove all files l2l-store.* of all ranks to begin anew"

Made = TypeVar("Made")
Manifest = dict[str, Any]


@dataclass(frozen=True)
class _Holding:
    """What a rank has.

    folder   its first one
    version  the one that it is to continue from
    run      in hexadecimal digits, and `rank`, as its files say; None without files
    commits  of each manifest, by the name of a version, or "" for the last complete step: how many commits the run had with it, and how
             many steps; those that are in place, and those that are `prepared`
    """

    folder: str
    version: str | None
    run: str | None
    rank: Sequence[int] | None
    in_place: Mapping[str, Sequence[int]]
    prepared: Mapping[str, Sequence[int]]

    def has(self, name: str) -> dict[int, int]:
        """The steps under a name, by their commits."""
        return {each[name][0]: each[name][1] for each in (self.in_place, self.prepared) if name in each}


class FoundRun:
    """The folders are locked as long as `locks` are there.

    among     the other ranks, None for a run of one
    rank      which one this is
    folders   of this rank: of several ranks, each has folders of its own in those of the option `disk`
    last      the manifest of the last complete step; None for a run that begins
    versions  the manifests of those that are kept, by name

    Raises `DiskError`. Of several ranks, all have to make this at the same place, and if one raises an error, all do.
    """

    def __init__(self, folders: Sequence[str], version: str | None = None, among: Agreement | None = None):
        self.among, self._asked, self._version = among, tuple(folders), version
        self.rank = ALONE if among is None else RankOfRun(among.rank, among.size)
        self.folders = self._asked if among is None else tuple(os.path.join(f, f"rank-{among.rank}") for f in folders)
        self._in_place: dict[str, Manifest] = {}
        self._prepared: dict[str, Manifest] = {}
        self.together(self._look)
        self._chosen = {name: each["commits"] for name, each in self._in_place.items()}
        if among is not None:
            own = self._holding()
            self._chosen = _agreed([_Holding(**each) for each in among.gather(asdict(own))])
        found = {name: self._with(name, commits) for name, commits in self._chosen.items()}
        self.last = found.pop(_LAST, None)
        self.versions = found
        if version is not None and version not in found:
            raise unknown(self.folders[0], version, found)

    def together(self, call: Callable[[], Made]) -> Made:
        """As `Agreement.together`."""
        return call() if self.among is None else self.among.together(call)

    @property
    def begin(self) -> Manifest | None:
        """The manifest from which this process continues."""
        return self.last if self._version is None else self.versions[self._version]

    def check_parts(self) -> None:
        """Raise `DiskError` unless all folders have their parts."""
        if self.last is not None:
            check_parts(self.folders, self.last)

    def settle(self) -> None:
        """Leave the manifests of the steps that all ranks have, and no others. Raises `DiskError`."""
        if self.among is None:
            return
        for name, manifest in self._prepared.items():
            if manifest["commits"] == self._chosen.get(name):
                confirm_manifest(self.folders[0], name or None)
            else:
                remove_manifest(self.folders[0], name or None, is_prepared=True)
        for name in self._in_place.keys() - self._chosen.keys():  # it was being dropped
            remove_manifest(self.folders[0], name or None)

    def _look(self) -> None:
        self._check_whose()
        if self.among is not None:
            _make(self.folders)
        self.locks = [FolderLock(each) for each in self.folders]
        folder = self.folders[0]
        for found, is_prepared in ((self._in_place, False), (self._prepared, True)):
            if is_prepared and self.among is None:
                continue
            for name in (_LAST, *names_of_versions(folder, is_prepared=is_prepared)):
                if (manifest := read_manifest(folder, name or None, is_prepared=is_prepared)) is not None:
                    found[name] = {"commits": 0, **manifest}
        self._check_manifests()

    def _check_whose(self) -> None:
        """Raise `DiskError` if the folders of the option `disk` have a run of one rank, and this is one of several, or the other way round."""
        first = self._asked[0]
        if self.among is not None and os.path.exists(path_of_manifest(first)):
            raise DiskError(
                f"{first}: the run there is {rank_of(read_manifest(first) or {})}, and here are {self.rank.size} ranks, each with a folder of its "
                "own in this one: give the option 'disk' another folder"
            )
        if self.among is None and (parts := parts_of_ranks(first)):
            of_part = rank_of(read_manifest(parts[0]) or {})
            raise DiskError(
                f"{first}: the run there is one of {of_part.size} ranks, and here is one: start as many, or give the option 'disk' another folder"
            )

    def _check_manifests(self) -> None:
        folder, versions = self.folders[0], {name for name in self._in_place if name != _LAST}
        last = self._in_place.get(_LAST, self._prepared.get(_LAST))
        if _LAST not in self._in_place and versions:
            raise DiskError(
                f"{path_of_manifest(folder)} is missing, and {listed(versions)} of its run are there: put it back, or remove all files l2l-store.* "
                "to begin anew"
            )
        for name, manifest in (*self._in_place.items(), *self._prepared.items()):
            if last is not None and manifest["id"] != last["id"]:
                raise DiskError(
                    f"{path_of_manifest(folder, name or None)} is of another run: put it back where it belongs, or remove it"
                )
        if self.among is None and last is not None and rank_of(last).size > 1:
            raise DiskError(
                f"{folder}: the run there is {rank_of(last)}, and here is one: start as many, or give the option 'disk' another folder"
            )

    def _holding(self) -> _Holding:
        folder = self.folders[0]
        manifest = self._in_place.get(_LAST, self._prepared.get(_LAST))
        run, rank = (manifest["id"], rank_of(manifest)) if manifest is not None else (None, None)
        if manifest is None and (part := PartOfRun.read(folder)) is not None:
            run, rank = part.run.hex(), part.rank
        return _Holding(folder, self._version, run, rank, _commits_of(self._in_place), _commits_of(self._prepared))

    def _with(self, name: str, commits: int) -> Manifest:
        return next(each[name] for each in (self._in_place, self._prepared) if name in each and each[name]["commits"] == commits)


def parts_of_ranks(folder: str) -> list[str]:
    """The folders, within one of the option `disk`, in which ranks have committed a step."""
    found = glob.glob(path_of_manifest(os.path.join(glob.escape(folder), "rank-*")))
    return sorted(os.path.dirname(each) for each in found)


def _make(folders: Sequence[str]) -> None:
    for folder in folders:
        try:
            if not os.path.isdir(folder):
                os.mkdir(folder)
                sync_folder(os.path.dirname(folder))
        except OSError as error:
            raise DiskError(
                f"{folder}: {error.strerror or error} while the folder of this rank was made: give the option 'disk' a folder that exists and may "
                "be written"
            ) from error


def _commits_of(manifests: Mapping[str, Manifest]) -> dict[str, list[int]]:
    return {name: [each["commits"], each["contents"]["steps"]] for name, each in manifests.items()}


def _agreed(holdings: Sequence[_Holding]) -> dict[str, int]:
    """By name, the newest step that all ranks have: how many commits the run had with it. Raises the same error on each rank."""
    for rank, each in enumerate(holdings):
        if each.version != holdings[0].version:
            raise L2LError(
                f"rank 0 resumes version {holdings[0].version!r}, and rank {rank} version {each.version!r} (None is the last complete step): give "
                "all ranks the same"
            )
    if not any(each.has(_LAST) for each in holdings):
        return {}  # no rank has committed a step
    _check_ranks(holdings)
    chosen = {}
    for name in sorted({name for each in holdings for name in (*each.in_place, *each.prepared)}):
        common = set.intersection(*({*each.has(name)} for each in holdings))
        if common:
            chosen[name] = max(common)
            _check_steps(holdings, name, chosen[name])
    if _LAST not in chosen and any(_LAST in each.in_place for each in holdings):
        has = "; ".join(f"rank {rank}: {sorted(each.has(_LAST).values())}" for rank, each in enumerate(holdings))
        raise DiskError(
            f"{holdings[0].folder}: the ranks have no step in common ({has} complete steps): put back their files, {_ANEW}"
        )
    return chosen if _LAST in chosen else {}


def _check_ranks(holdings: Sequence[_Holding]) -> None:
    """Raise `DiskError` unless each rank has its part of one run."""
    first = next(number for number, each in enumerate(holdings) if each.has(_LAST))
    of_first = holdings[first]
    for rank, each in enumerate(holdings):
        if each.rank is not None and each.rank[1] != len(holdings):
            raise DiskError(
                f"{each.folder}: the part there is {RankOfRun(*each.rank)} of a run, and here are {len(holdings)} ranks: start as many as the run "
                "has, or give the option 'disk' another folder"
            )
        if each.rank is not None and each.rank[0] != rank:
            raise DiskError(
                f"{each.folder}: the part there is {RankOfRun(*each.rank)} of a run, and it was given to rank {rank}: give each rank its own part"
            )
        if each.run is None:
            raise DiskError(
                f"{each.folder}: the part of rank {rank} is missing, and {of_first.folder} has that of rank {first}: mount its disk, or put back "
                f"its files, {_ANEW}"
            )
        if each.run != of_first.run:
            raise DiskError(
                f"{each.folder}: the part of rank {rank} is of another run than that of rank {first} in {of_first.folder}: put back the parts of one "
                f"run, {_ANEW}"
            )


def _check_steps(holdings: Sequence[_Holding], name: str, commits: int) -> None:
    """Raise `DiskError` if ranks have made other numbers of steps until a commit."""
    steps = [each.has(name)[commits] for each in holdings]
    if len({*steps}) > 1:
        raise DiskError(
            f"{holdings[0].folder}: the ranks have made {steps} steps until the same commit: put back parts of one run, {_ANEW}"
        )


def listed(versions: Sequence[str] | set[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(versions))) or "no version"


def unknown(folder: str, version: str, versions: Mapping[str, Any]) -> DiskError:
    return DiskError(
        f"{folder} has no version {version!r}, but {listed(versions)}: name one of them (l2l_compile.versions lists them)"
    )
