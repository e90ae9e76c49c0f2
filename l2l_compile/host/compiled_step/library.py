"""Build C texts into libraries, and keep them beside Inductor's cache: the next process, and the other ranks, load them.

A library is stored under the digest of all that it depends on: its text, the options, the compiler and the instructions of
the machine. Its checksum is stored with it, so a file that is incomplete is detected before it is loaded.

A library is code that runs when it is loaded. It is loaded from a copy that this process has just written into a place that no
other user can write into, so that the file that is checked and the file that runs are the same. The folder on disk is trusted
only if it belongs to this user alone (`cache_folder.py`).
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

from l2l_compile.errors import LoweringError
from l2l_compile.lowering.faster import trace_cache

_log = logging.getLogger(__name__)
_REMEDY = "The option compile_update=False runs the optimizer's own step"
_NOEXEC = "If the temporary folder is mounted noexec, set TMPDIR to a folder from which code may run"
_LANGUAGE = ("-x", "c", "-std=gnu11")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC")


def build(text: str) -> ctypes.CDLL:
    """The library of a C text. Raises `LoweringError` where there is no C compiler, or it fails."""
    compiler = _compiler()
    name = _digest(text, *_identity(compiler)) if trace_cache.in_use() else None
    for library in trace_cache.libraries(name) if name is not None else ():
        with suppress(OSError):  # a library of a machine with other system libraries
            return _load(library)
    library = _compiled(compiler, text)
    if name is not None:
        trace_cache.write_library(name, library)
    try:
        return _load(library)
    except OSError as error:
        raise LoweringError(f"the compiled update cannot be loaded: {error}. {_NOEXEC}. {_REMEDY}") from error


def _load(library: bytes) -> ctypes.CDLL:
    """Load a library from a copy of this process's own. Raises `OSError` where no place lets code run."""
    try:
        with tempfile.TemporaryDirectory(prefix="l2l_compile_") as folder:  # mode 0700, with a new name
            path = Path(folder) / "update.so"
            path.write_bytes(library)
            return ctypes.CDLL(str(path))
    except OSError as error:
        if not hasattr(os, "memfd_create"):
            raise
        _log.debug("no library can be loaded from the temporary folder: %s", error)
    return _load_from_memory(library)


def _load_from_memory(library: bytes) -> ctypes.CDLL:
    """Load a library from memory: a temporary folder may be full, or mounted so that nothing in it runs (noexec).

    The file stays open. The linker knows a library by its path: another one with the same number would be taken for this one.
    """
    handle = os.memfd_create("l2l_compile_update")
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(library)
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except BaseException:
        os.close(handle)
        raise


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


def _compiled(compiler: str, text: str) -> bytes:
    """The library of a C text. Raises `LoweringError` where the compiler fails, or nothing can be written."""
    try:
        with tempfile.TemporaryDirectory(prefix="l2l_compile_") as folder:
            library = Path(folder) / "update.so"
            _compile(compiler, text, library)
            return library.read_bytes()
    except OSError as error:
        raise LoweringError(
            f"no compiled update can be written into the temporary folder {tempfile.gettempdir()}: {error.strerror}. "
            f"Set TMPDIR to a folder with room. {_REMEDY}"
        ) from error


def _compile(compiler: str, text: str, library: Path) -> None:
    command = [compiler, *_LANGUAGE, *_FLAGS, "-shared", "-", "-o", str(library), "-lm"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise LoweringError(f"{compiler} cannot compile the update: {done.stderr.strip()[-500:]}. {_REMEDY}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
