"""Keeps traces and proofs of blocks on disk for later processes, beside Inductor's cache.

An entry is found by the digest of its key. The key has everything that the entry depends on, including the sources of this
package and the version of PyTorch. A key without a name that is valid in every process has no entries: for example, one with
a custom operator of the user, whose code may change.

Entries are JSON with a checksum, written to a temporary file and then moved into place. A damaged entry is dropped and made
again. Nothing in an entry is executed: `disk_traces` rebuilds graphs of PyTorch's own operators only. Compiled updates are
libraries, and run as code.

A checksum finds damage, and does not say who wrote an entry. `cache_folder` does: entries are used only from a folder that
belongs to this user and that nobody else can write into. Where there is no such folder, or the disk refuses to be read or
written, nothing is kept, training goes on, and one warning says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sympy
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from l2l_compile.cache_folder import CacheFolder, FolderRefused, Usage, supported
from l2l_compile.user_line import warn

T = TypeVar("T")
_log = logging.getLogger(__name__)
OPERATORS = ("aten", "prims")  # libraries whose operators are a part of PyTorch
_LIMIT = 2 << 30  # bytes
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kmgt]?i?b)", re.IGNORECASE | re.ASCII)
_UNITS = (
    {"b": 1}
    | {f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}
    | {f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)}
)
_MODULES = ("torch", "operator", "_operator", "math", "builtins")


class Untold(Exception):
    """A key or an entry has a part that another process may not know by name."""


def in_use() -> bool:
    """Whether entries are kept on disk: not with `L2L_CACHE=0`, and not if Inductor's caches are switched off."""
    return os.environ.get("L2L_CACHE", "1") != "0" and config.fx_graph_cache and not config.force_disable_caches


def digest(key: Any) -> str | None:
    """The digest under which a key's entries are; None for a key without a name in other processes, or if nothing is kept."""
    if not in_use():
        return None
    try:
        return hashlib.sha256("\n".join([*_versions(), _told(key)]).encode()).hexdigest()
    except Untold as reason:
        _log.debug("not kept on disk: %s", reason)
        return None


def read(name: str) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """The entries under a digest. Each comes with a function that deletes it, for a caller that cannot use it."""
    for content, drop in _contents(name, ".json"):
        try:
            checksum, text = content.decode().split("\n", 1)
            if checksum != _checksum(text.encode()):
                raise ValueError("its checksum is wrong")
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            drop(str(error))
            continue
        yield entry, drop


def write(name: str, entry: Any) -> None:
    """Add an entry under a digest. If the disk cannot be written to, only the entry is lost; no error is raised."""
    text = json.dumps(entry)
    checksum = _checksum(text.encode())
    _put(name, f"{checksum[:16]}.json", f"{checksum}\n{text}".encode())


def libraries(name: str) -> Iterator[bytes]:
    """The contents of the libraries under a digest, from a folder that only this user can write into."""
    for content, drop in _contents(name, ".so"):
        checksum, separator, library = content.partition(b"\n")
        if separator and checksum.decode("ascii", "replace") == _checksum(library):
            yield library
        else:
            drop("its checksum is wrong")


def write_library(name: str, library: bytes) -> None:
    """Keep a library under a digest, as `write` keeps an entry."""
    checksum = _checksum(library)
    _put(name, f"{checksum[:16]}.so", f"{checksum}\n".encode() + library)


def size() -> tuple[Path, Usage]:
    """The folder of this user's entries, and what it holds. Raises `FolderRefused` or `OSError` for a folder that is not used."""
    folder = _folder()
    return folder.path, folder.usage()


def clear() -> tuple[Path, Usage]:
    """Delete all entries, and return their folder and what it held. Raises as `size` does."""
    folder = _folder()
    return folder.path, folder.clear()


def limit() -> int:
    """The most bytes that entries take before the oldest are deleted: `L2L_CACHE_SIZE`, such as "500MB"; 2 GiB without it."""
    written = os.environ.get("L2L_CACHE_SIZE", "").strip()
    match = _SIZE.fullmatch(written)
    if match is None and written:
        _say_once(written, f"L2L_CACHE_SIZE={written!r} is no size such as '500MB' or '2GiB', and counts as {_LIMIT >> 30} GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match is not None else _LIMIT


def _contents(name: str, suffix: str) -> Iterator[tuple[bytes, Callable[[str], None]]]:
    """The contents of the entries under a digest, each with a function that deletes the entry."""
    folder = _usable()
    if folder is None:
        return
    for file in _tried(folder, functools.partial(folder.names, name, suffix)) or ():
        content = _tried(folder, functools.partial(folder.read, name, file))
        if content is not None:
            yield content, functools.partial(_drop, folder, name, file)


def _put(name: str, file: str, content: bytes) -> None:
    folder = _usable()
    if folder is not None:
        _tried(folder, functools.partial(folder.write, name, file, content))
        _tried(folder, functools.partial(_prune, folder, len(content)))


_unchecked: int | None = None  # bytes that this process has written since it last compared the folder with the limit


def _prune(folder: CacheFolder, written: int) -> None:
    """Hold the folder below its limit. It is looked at after the first entry of a process, and then once for 1/16 of the limit."""
    global _unchecked  # without a lock: if two threads look at once, nothing is lost
    most = limit()
    _unchecked = None if _unchecked is None else _unchecked + written
    is_due = _unchecked is None or _unchecked > most // 16
    _unchecked = 0 if is_due else _unchecked
    if is_due:
        removed = folder.prune(most)
        _log.debug("deleted %d entries (%d bytes) of %s", removed.entries, removed.bytes, folder.path)


def _drop(folder: CacheFolder, name: str, file: str, why: str) -> None:
    _log.debug("dropped %s of %s: %s", file, name, why)
    folder.drop(name, file)


def _folder() -> CacheFolder:
    """The folder of this user's entries, beside Inductor's. Raises `FolderRefused` on a system without users, and `OSError`."""
    if not supported():
        raise FolderRefused("this system does not say who owns a file")
    return CacheFolder(Path(cache_dir()))


def _usable() -> CacheFolder | None:
    """The folder of this user's entries; None if there can be none, which is said once."""
    try:
        return _folder()
    except (FolderRefused, OSError) as error:
        _say_unused(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "of Inductor's cache"), error)
        return None


def _tried(folder: CacheFolder, use: Callable[[], T]) -> T | None:
    """The result of a use of the folder; None where the disk refuses, which is said once."""
    try:
        return use()
    except FileNotFoundError as error:  # deleted by another process, or by the user: what it held is made again
        _log.debug("not found: %s", error)
    except (FolderRefused, OSError) as error:
        _say_unused(str(folder.path), error)
    return None


_said: set[str] = set()  # the folders, and the settings, about which this process has warned


def _say_unused(where: str, error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    _log.debug("%s is not used: %s", where, reason)
    _say_once(
        where,
        f"backend 'l2l' cannot use its folder on disk {where}: {reason}. Training goes on, and the next process compiles anew. "
        "Remedy: make room there, or delete the folder if it is not yours alone (mode 0700); or set TORCHINDUCTOR_CACHE_DIR to "
        "a folder of your own. L2L_CACHE=0 keeps nothing and says nothing",
    )


def _say_once(subject: str, sentence: str) -> None:
    if subject not in _said:
        _said.add(subject)
        warn(sentence)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """The versions that every entry depends on: PyTorch, Python, and the sources of this package."""
    text = hashlib.sha256()
    for path in sources():
        text.update(path.read_bytes())
    return torch.__version__, str(torch.version.git_version), sys.version, text.hexdigest()


def sources() -> list[Path]:
    """The files of this package, in a fixed order. Its passes may be in another folder."""
    packages = [importlib.import_module(name) for name in ("l2l_compile", "l2l_compile.passes")]
    folders = {Path(folder) for package in packages for folder in package.__path__}
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


def _told(value: Any) -> str:
    """A text for a value. Texts of two processes are equal only if the values are equal. Raises `Untold`."""
    if isinstance(value, tuple):
        return f"({','.join(map(_told, value))})"
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, sympy.Symbol)):
        return f"{type(value).__name__}:{value!r}"
    if callable(value):
        return target_name(value)
    raise Untold(f"a {type(value).__name__}")


def target_name(target: Callable) -> str:
    """The name of a function of PyTorch or Python, valid in every process. Raises `Untold` for other functions."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in OPERATORS:
            raise Untold(f"the operator {target}")
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator) and type(target).__module__.split(".")[0] == "torch":
        return f"higher order {target.name()}"
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    name = name.removeprefix("_VariableFunctionsClass.")  # a part of the names of functions of `torch`
    if module.split(".")[0] not in _MODULES or _attribute(sys.modules.get(module), name) is not target:
        raise Untold(f"the function {target}")
    return f"{module}.{name}"


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner
