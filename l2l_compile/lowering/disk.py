"""Keeps traces and proofs of blocks on disk for later processes, beside Inductor's cache.

An entry is found by the digest of its key. The key has everything that the entry depends on, including the sources of this
package and the version of PyTorch. A key without a name that is valid in every process has no entries: for example, one with
a custom operator of the user, whose code may change.

Entries are JSON with a checksum, written to a temporary file and then moved into place. A damaged entry is dropped and made
again. Nothing in an entry is executed: `disk_traces` rebuilds graphs of PyTorch's own operators only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

_log = logging.getLogger(__name__)
OPERATORS = ("aten", "prims")  # libraries whose operators are a part of PyTorch
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
    folder = folder_of(name)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        drop = functools.partial(_drop, path)
        try:
            checksum, text = path.read_text().split("\n", 1)
            if checksum != _checksum(text):
                raise ValueError("its checksum is wrong")
            entry = json.loads(text)
        except OSError as error:  # it is another user's, or deleted: it may be valid
            _log.debug("cannot read %s: %s", path, error)
            continue
        except ValueError as error:
            drop(str(error))
            continue
        yield entry, drop


def write(name: str, entry: Any) -> None:
    """Add an entry under a digest. If the disk cannot be written to, only the entry is lost; no error is raised."""
    text = json.dumps(entry)
    put(name, f"{_checksum(text)[:16]}.json", f"{_checksum(text)}\n{text}".encode())


def put(name: str, file: str, content: bytes) -> None:
    """Write a file among the entries under a digest, atomically."""
    folder = folder_of(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as written:
            written.write(content)
        os.replace(temporary, folder / file)
    except OSError as error:
        _log.debug("not kept on disk: %s", error)


def _drop(path: Path, why: str) -> None:
    _log.debug("dropped %s: %s", path, why)
    with suppress(OSError):
        path.unlink()


def folder_of(name: str) -> Path:
    """The folder of the entries under a digest."""
    return Path(cache_dir()) / "l2l_compile" / name[:2] / name


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
