"""What a process has found out about blocks, kept on disk for the next one: traces and proofs, beside Inductor's cache.

An entry lies under the digest of a key: everything that it depends on, the sources of this package and the version of
PyTorch among them. A key that cannot be told from another process (an operator of the user's, whose code may change) has none.

Entries are JSON with a checksum, written to a file of their own and moved into place. What is damaged is dropped and
made again. Nothing in an entry is executed: `disk_traces` rebuilds graphs of PyTorch's own operators, and of no others.
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
    """A key, or an entry, with something in it that another process may not know by name."""


def in_use() -> bool:
    """Whether anything is kept: not with `L2L_CACHE=0`, and not where Inductor's caches are switched off."""
    return os.environ.get("L2L_CACHE", "1") != "0" and config.fx_graph_cache and not config.force_disable_caches


def digest(key: Any) -> str | None:
    """The name of a key's entries; None for a key that cannot be told, or if nothing is kept."""
    if not in_use():
        return None
    try:
        return hashlib.sha256("\n".join([*_versions(), _told(key)]).encode()).hexdigest()
    except Untold as reason:
        _log.debug("not kept on disk: %s", reason)
        return None


def read(name: str) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """The entries under a digest. Each comes with a function that drops it, for the one who finds that it cannot be right."""
    folder = folder_of(name)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        drop = functools.partial(_drop, path)
        try:
            checksum, text = path.read_text().split("\n", 1)
            if checksum != _checksum(text):
                raise ValueError("its checksum is wrong")
            entry = json.loads(text)
        except OSError as error:  # another user's, or gone: it may be right
            _log.debug("cannot read %s: %s", path, error)
            continue
        except ValueError as error:
            drop(str(error))
            continue
        yield entry, drop


def write(name: str, entry: Any) -> None:
    """Add an entry under a digest. A disk that cannot be written to costs nothing but the entry."""
    text = json.dumps(entry)
    put(name, f"{_checksum(text)[:16]}.json", f"{_checksum(text)}\n{text}".encode())


def put(name: str, file: str, content: bytes) -> None:
    """Put a file among the entries under a digest, whole or not at all."""
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
    """Where the entries under a digest lie."""
    return Path(cache_dir()) / "l2l_compile" / name[:2] / name


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """What decides how keys become entries: PyTorch, Python, and the sources of this package."""
    text = hashlib.sha256()
    for path in sources():
        text.update(path.read_bytes())
    return torch.__version__, str(torch.version.git_version), sys.version, text.hexdigest()


def sources() -> list[Path]:
    """The files of this package, in a fixed order; its passes may lie elsewhere."""
    packages = [importlib.import_module(name) for name in ("l2l_compile", "l2l_compile.passes")]
    folders = {Path(folder) for package in packages for folder in package.__path__}
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


def _told(value: Any) -> str:
    """A text that is equal in another process for an equal value alone."""
    if isinstance(value, tuple):
        return f"({','.join(map(_told, value))})"
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, sympy.Symbol)):
        return f"{type(value).__name__}:{value!r}"
    if callable(value):
        return target_name(value)
    raise Untold(f"a {type(value).__name__}")


def target_name(target: Callable) -> str:
    """The name by which every process knows a function of PyTorch or Python. Raises `Untold` for others."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in OPERATORS:
            raise Untold(f"the operator {target}")
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator) and type(target).__module__.split(".")[0] == "torch":
        return f"higher order {target.name()}"
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    name = name.removeprefix("_VariableFunctionsClass.")  # as functions of `torch` call themselves
    if module.split(".")[0] not in _MODULES or _attribute(sys.modules.get(module), name) is not target:
        raise Untold(f"the function {target}")
    return f"{module}.{name}"


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner
