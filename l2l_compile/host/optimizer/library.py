"""Build C texts into libraries, and keep them beside Inductor's cache: the next process, and the other ranks, load them.

A library is stored under the digest of all that it depends on: its text, the options, the compiler and the instructions of
the machine. Its name is the checksum of its content, so a file that is incomplete is detected before it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from ...errors import LoweringError
from ...lowering import disk

_log = logging.getLogger(__name__)
_REMEDY = "The option compile_update=False runs the optimizer's own step"
_LANGUAGE = ("-x", "c", "-std=gnu11")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC")


def build(text: str) -> ctypes.CDLL:
    """The library of a C text. Raises `LoweringError` where there is no C compiler, or it fails."""
    compiler = _compiler()
    name = _digest(text, *_identity(compiler)) if disk.in_use() else None
    found = name and _kept(disk.folder_of(name))
    if found:
        return found
    with tempfile.TemporaryDirectory(prefix="l2l_compile_") as temporary:
        library = Path(temporary) / "update.so"
        _compile(compiler, text, library)
        if name:
            disk.put(name, f"{_checksum(library)}.so", library.read_bytes())
        return ctypes.CDLL(str(library))


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "gcc", "clang", "cc"):
        if name and shutil.which(name):
            return name
    raise LoweringError(f"no C compiler (g++, gcc or clang, or the variable CXX) was found to compile the update. {_REMEDY}")


@functools.cache
def _identity(compiler: str) -> tuple[str, ...]:
    """All that the result depends on besides the text: the compiler's version and options, with `-march=native` spelled out.

    Compilers print this with `-v`, in a run that writes nothing.
    """
    asked = [compiler, *_LANGUAGE, *_FLAGS, "-E", "-v", os.devnull]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return str(shutil.which(compiler)), *asked, done.stderr


def _compile(compiler: str, text: str, library: Path) -> None:
    command = [compiler, *_LANGUAGE, *_FLAGS, "-shared", "-", "-o", str(library), "-lm"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise LoweringError(f"{compiler} cannot compile the update: {done.stderr.strip()[-500:]}. {_REMEDY}")


def _kept(folder: Path) -> ctypes.CDLL | None:
    """The library that a folder keeps, if it is complete and can be loaded."""
    for path in folder.glob("*.so"):
        with suppress(OSError):
            if path.stem == _checksum(path):
                return ctypes.CDLL(str(path))
            _log.debug("dropped %s: its checksum is wrong", path)
            path.unlink()
    return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
