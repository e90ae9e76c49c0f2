"""The files of a resumable run: one in each folder, whose header says which part of which run it is, so that no part is taken for another.

    page 0 to 15    with which the file system was tried
    page 16         the run, the number of the part, the run's first folder, which has the manifest, and the rank

All other pages are of tensors. Among several ranks, each has files of its own, in folders of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from l2l_compile.disk.disk_file import PAGE, PROBED, DiskFile
from l2l_compile.disk.manifest import path_of_manifest
from l2l_compile.errors import DiskError
from l2l_compile.units import format_bytes

DATA = "l2l-store.bin"
HEADER = PROBED + PAGE  # bytes
_FIELDS = struct.Struct("<16sIH")  # the last one are the bytes of the first folder's path, which follows
_RANK = struct.Struct("<II")  # behind this path: the rank, and how many there are


class RankOfRun(NamedTuple):
    """Which rank of how many."""

    number: int = 0
    size: int = 1

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}" if self.size > 1 else "a run of one rank"


ALONE = RankOfRun()


class PartOfRun(NamedTuple):
    """What the header of a file says.

    run     16 bytes
    number  of the part
    first   the folder of the first part
    rank    whose files these are
    """

    run: bytes
    number: int
    first: str
    rank: RankOfRun = ALONE

    def write(self, file: DiskFile) -> None:
        """Raises `DiskError`."""
        path = os.fsencode(os.path.abspath(self.first))
        text = _FIELDS.pack(self.run, self.number, len(path)) + path + _RANK.pack(*self.rank)
        with memoryview(mmap.mmap(-1, PAGE)) as page:
            page[: len(text)] = text
            file.write(page, PROBED)

    @classmethod
    def read(cls, folder: str) -> PartOfRun | None:
        """What the file in a folder says; None if there is no file, or one without a header. Raises `DiskError`."""
        path = os.path.join(folder, DATA)
        try:
            with open(path, "rb") as file:
                file.seek(PROBED)
                page = file.read(PAGE)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskError(f"{path}: {error.strerror or error} while the header of a run's file was read") from error
        if len(page) < PAGE or not any(page):
            return None
        run, number, size = _FIELDS.unpack_from(page)
        end = _FIELDS.size + size
        rank = RankOfRun(*_RANK.unpack_from(page, end))
        return cls(run, number, os.fsdecode(page[_FIELDS.size : end]), rank if rank.size else ALONE)


def remove_parts(folders: Sequence[str]) -> None:
    """Remove files that a run has left which ended before its first commit. Raises `DiskError` for those of other runs; all stay then.

    A part beside one without a manifest is of such a run. A part without its first one is not: that may be on a disk that is not mounted.
    """
    parts = [PartOfRun.read(folder) for folder in folders]
    for number, (folder, part) in enumerate(zip(folders, parts, strict=True)):
        if number and os.path.exists(path_of_manifest(folder)):
            raise DiskError(
                f"{folder}: another run has its first folder there ({path_of_manifest(folder)}): give the option 'disk' another folder in its place"
            )
        if part is not None and part.number and not (parts[0] is not None and parts[0].run == part.run and parts[0].number == 0):
            raise DiskError(
                f"{folder}: {DATA} is part {part.number + 1} of a run whose manifest was {path_of_manifest(part.first)}, and {folders[0]} has "
                f"not the first part: give 'disk' the folders of this run, in their order, or remove {DATA} to give the run up"
            )
    for folder in reversed(folders):  # the first one last, by which the others are known
        _remove(os.path.join(folder, DATA))


def check_parts(folders: Sequence[str], manifest: Mapping[str, Any]) -> None:
    """Raise `DiskError` unless the folders have the parts of the run that a manifest is of, each its own."""
    theirs = manifest["folders"]
    if len(theirs) != len(folders):
        missing = [folder for folder in theirs if not any(_same(folder, ours) for ours in folders)]
        found = f"{missing[0]} is missing" if missing else f"'disk' has {len(folders)}"
        raise DiskError(
            f"{folders[0]}: the run there is striped over {len(theirs)} folders, {', '.join(theirs)}, and {found}: give 'disk' all of them, in this "
            "order"
        )
    for number, folder in enumerate(folders):
        path = os.path.join(folder, DATA)
        if not os.path.exists(path):
            raise _not_of(folders, folder, "is missing")
        size = os.stat(path).st_size
        if size < manifest["end"]:
            raise _not_of(folders, folder, f"has {format_bytes(size)} in place of {format_bytes(manifest['end'])}")
        part = PartOfRun.read(folder)
        if part is None or part.run.hex() != manifest["id"]:
            raise _not_of(folders, folder, "is of another run")
        if part.number != number:
            raise _not_of(folders, folder, f"is part {part.number + 1} of this run in place of part {number + 1}")
        if part.rank != rank_of(manifest):
            raise _not_of(folders, folder, f"is of {part.rank}")


def rank_of(manifest: Mapping[str, Any]) -> RankOfRun:
    """Whose manifest it is."""
    return RankOfRun(*manifest.get("rank", ALONE))


def _not_of(folders: Sequence[str], folder: str, found: str) -> DiskError:
    first = folders[0]
    return DiskError(
        f"{folder}: {DATA} {found}, so {path_of_manifest(first)} is not of it: put back the files of the run, give 'disk' its folders in their "
        "order, or remove all files l2l-store.* to begin anew"
    )


def _same(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskError(
            f"{path}: {error.strerror or error} while the file of a run without a complete step was removed"
        ) from error
