"""A folder for Inductor's files: its own cache, or a temporary folder where that cannot be written to.

Inductor writes each kernel into its cache before it compiles it, so a folder that cannot be made, a disk that is full or a
file system that is read-only would end training.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref

from torch._inductor.runtime.cache_dir_utils import cache_dir

from l2l_compile.user_line import warn

_NEEDED = 1 << 20  # bytes that a few kernels take


def ensure_writable() -> None:
    """Let Inductor use a temporary folder of this process if its cache cannot be written to, and warn once."""
    _ensure(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))


@functools.cache  # for each folder: a folder that a user sets later is looked at as well
def _ensure(wanted: str | None) -> None:
    try:
        _write_into(cache_dir())
    except OSError as error:
        _use_temporary(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "of Inductor"), error)


def _use_temporary(wanted: str, why: OSError) -> None:
    try:
        folder = tempfile.mkdtemp(prefix="l2l_compile_inductor_")
        weakref.finalize(_OWNER, _remove, folder, os.getpid())
        _write_into(folder)
    except OSError:
        return  # Inductor raises where it needs the folder, and the error of the block says so
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    warn(
        f"backend 'l2l': the cache folder {wanted} cannot be written to ({why.strerror or why}). This process compiles into "
        f"{folder}, which is deleted when it ends, so the next process compiles anew. Remedy: make room there, or set "
        "TORCHINDUCTOR_CACHE_DIR to a folder that you can write to"
    )


def _write_into(folder: str) -> None:
    """Raise `OSError` if some kernels have no room in a folder."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # with a name, as Inductor's files have
        file.write(bytes(_NEEDED))
        file.flush()


class _Owner:
    """Lives as long as the process."""


_OWNER = _Owner()


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a forked child ends earlier than the process that uses the folder
        shutil.rmtree(folder, ignore_errors=True)
