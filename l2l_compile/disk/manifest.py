"""The manifest of a store: what the last complete step consists of. It is replaced as a whole, or not at all.

    l2l-store manifest 2\\n
    SHA-256 of the rest, in hexadecimal digits\\n
    torch.save of plain values and small tensors, read with `weights_only=True`: no code in it runs

A reader finds the manifest of one step or that of the next, and never parts of both. A version that is kept under a name has a
manifest of its own, as the last complete step had it: the version is there if, and as long as, this file is.

Among several ranks, each first writes a manifest that is prepared, beside the one before. It takes the place of that one when all ranks
have prepared theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from typing import Any

import torch

from l2l_compile.disk.disk_file import RESUMES
from l2l_compile.errors import DiskError
from l2l_compile.units import format_bytes

_NAME = "l2l-store.manifest"
_MAGIC = b"l2l-store manifest "
_FORMAT = b"2"
_VERSION = "l2l-store.version."  # followed by the name of a version
NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}")  # of versions: each is a part of a file's name
UNFINISHED, PREPARED = ".new", ".next"


def path_of_manifest(folder: str, version: str | None = None, *, is_prepared: bool = False) -> str:
    """Of the last complete step, or of a version."""
    return os.path.join(folder, (_NAME if version is None else _VERSION + version) + PREPARED * is_prepared)


def names_of_versions(folder: str, *, is_prepared: bool = False) -> list[str]:
    """The versions that are kept, or prepared, in a folder. Raises `DiskError`."""
    try:
        found = os.listdir(folder)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror or error} while versions were looked for") from error
    names = [name.removeprefix(_VERSION) for name in found if name.startswith(_VERSION)]
    if is_prepared:
        names = [name.removesuffix(PREPARED) for name in names if name.endswith(PREPARED)]
    return sorted(name for name in names if NAMES.fullmatch(name) and not name.endswith((UNFINISHED, PREPARED)))


def read_manifest(folder: str, version: str | None = None, *, is_prepared: bool = False) -> dict[str, Any] | None:
    """A manifest in a folder; None if there is none. Raises `DiskError` for one that is damaged or of another format."""
    path = path_of_manifest(folder, version, is_prepared=is_prepared)
    try:
        with open(path, "rb") as file:
            first, digest, rest = file.readline(), file.readline(), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror or error} while this manifest was read") from error
    if first.startswith(_MAGIC) and first.endswith(b"\n") and first != _MAGIC + _FORMAT + b"\n":
        raise DiskError(
            f"{path} has format {first[len(_MAGIC) :].strip().decode(errors='replace')!r}, and this version of l2l_compile reads format "
            f"{_FORMAT.decode()!r}: resume with the version that wrote it"
        )
    if first != _MAGIC + _FORMAT + b"\n" or digest.strip() != hashlib.sha256(rest).hexdigest().encode():
        raise DiskError(f"{path} is damaged, as its checksum shows: put back a copy of it, or remove {_lost(version)}")
    found: dict[str, Any] = torch.load(io.BytesIO(rest), weights_only=True)
    return found


def _lost(version: str | None) -> str:
    return "all files l2l-store.* of this folder to begin anew" if version is None else "it, which drops the version"


def write_manifest(folder: str, manifest: dict[str, Any], version: str | None = None, *, is_prepared: bool = False) -> int:
    """Replace a manifest in a folder, durably. Returns its bytes. Raises `DiskError`, and the manifest before it still holds.

    One that `is_prepared` leaves the manifest before it there, until `confirm_manifest`.
    """
    buffer = io.BytesIO()
    torch.save(manifest, buffer)
    rest = buffer.getvalue()
    text = _MAGIC + _FORMAT + b"\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    path = path_of_manifest(folder, version, is_prepared=is_prepared)
    try:
        _write_durably(path + UNFINISHED, text)
        os.replace(path + UNFINISHED, path)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path + UNFINISHED)
        of, remedy = (
            ("a step", RESUMES)
            if version is None
            else (f"version {version!r}", "The step is committed, and the version is not kept")
        )
        raise DiskError(
            f"{path}: {error.strerror or error} while {format_bytes(len(text))} of the manifest of {of} were written. {remedy}"
        ) from error
    return len(text)


def confirm_manifest(folder: str, version: str | None = None) -> None:
    """Put a manifest that is prepared in the place of the one before, durably. Raises `DiskError`."""
    path = path_of_manifest(folder, version)
    try:
        os.replace(path + PREPARED, path)
        sync_folder(folder)
    except OSError as error:
        raise DiskError(
            f"{path}: {error.strerror or error} while the manifest took the place of the one before. {RESUMES}"
        ) from error


def remove_manifest(folder: str, version: str | None, *, is_prepared: bool = False) -> None:
    """Remove a manifest, durably: a version is gone when, and only when, this returns or later. Raises `DiskError`."""
    path = path_of_manifest(folder, version, is_prepared=is_prepared)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sync_folder(folder)
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror or error} while the manifest was removed") from error


def _write_durably(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        left = memoryview(text)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    """Make the name of a file durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
