"""The manifest of a store: what the last complete step consists of. It is replaced as a whole, or not at all.

    l2l-store manifest 2\\n
    SHA-256 of the rest, in hexadecimal digits\\n
    torch.save of plain values and small tensors, read with `weights_only=True`: no code in it runs

A reader finds the manifest of one step or that of the next, and never parts of both.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from typing import Any

import torch

from l2l_compile.disk.disk_file import RESUMES
from l2l_compile.errors import DiskError
from l2l_compile.units import format_bytes

_NAME = "l2l-store.manifest"
_MAGIC = b"l2l-store manifest "
_FORMAT = b"2"


def path_of_manifest(folder: str) -> str:
    return os.path.join(folder, _NAME)


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The manifest in a folder; None if there is none. Raises `DiskError` for one that is damaged or of another format."""
    path = path_of_manifest(folder)
    try:
        with open(path, "rb") as file:
            first, digest, rest = file.readline(), file.readline(), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror or error} while the manifest of the last complete step was read") from error
    if first.startswith(_MAGIC) and first.endswith(b"\n") and first != _MAGIC + _FORMAT + b"\n":
        raise DiskError(
            f"{path} has format {first[len(_MAGIC) :].strip().decode(errors='replace')!r}, and this version of l2l_compile reads format "
            f"{_FORMAT.decode()!r}: resume with the version that wrote it"
        )
    if first != _MAGIC + _FORMAT + b"\n" or digest.strip() != hashlib.sha256(rest).hexdigest().encode():
        raise DiskError(
            f"{path} is damaged, as its checksum shows: put back a copy of it, or remove all files l2l-store.* of this folder to begin anew"
        )
    found: dict[str, Any] = torch.load(io.BytesIO(rest), weights_only=True)
    return found


def write_manifest(folder: str, manifest: dict[str, Any]) -> int:
    """Replace the manifest in a folder, durably. Returns its bytes. Raises `DiskError`, and the manifest before it still holds."""
    buffer = io.BytesIO()
    torch.save(manifest, buffer)
    rest = buffer.getvalue()
    text = _MAGIC + _FORMAT + b"\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    path = path_of_manifest(folder)
    try:
        _write_durably(path + ".new", text)
        os.replace(path + ".new", path)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path + ".new")
        raise DiskError(
            f"{path}: {error.strerror or error} while {format_bytes(len(text))} of the manifest of a step were written. {RESUMES}"
        ) from error
    return len(text)


def _write_durably(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        left = memoryview(text)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: str) -> None:
    """Make the name of a file durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
