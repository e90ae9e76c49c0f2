"""Find which vector instructions the C++ compiler supports: the best kind while Dynamo traces a model, the other kinds later.

Inductor tests all kinds, one after the other, at the first kernel. Each test is one compilation or more. Inductor uses the
first kind that is supported, unless the user wants another one. The results are kept in the process and on disk.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading
from collections.abc import Callable

import torch._inductor.config
from torch._inductor import cpu_vec_isa

from l2l_compile.lowering.faster.low_priority import give_way
from l2l_compile.lowering.inductor_folder import ensure_writable

_log = logging.getLogger(__name__)


@functools.cache
def ask() -> threading.Thread | None:
    """Begin to look for the best kind. Inductor knows no other kind until `ask_for_the_others` has been called."""
    chosen = torch._inductor.config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    if chosen or platform.machine() not in ("x86_64", "AMD64"):  # chosen by the user, or a machine with one kind
        return None
    ensure_writable()  # a kind counts as not supported if the test cannot be written
    return _in_background(_find_best)


@functools.cache
def ask_for_the_others() -> threading.Thread | None:
    """Begin to look for all other kinds, which a user may set. No kernel is waiting for the compiler at this time."""
    return _in_background(_find_all) if ask() is not None else None


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=_try, args=(work,), name="l2l-compiler", daemon=True)
    thread.start()
    return thread


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - Inductor asks again, and raises it where it belongs
        _log.debug("the C++ compiler cannot be asked for vector instructions: %s", error)


def _offered() -> list[cpu_vec_isa.VecISA]:
    """The kinds that the processor supports, the best one first. `bool(kind)` tests whether the compiler supports it too."""
    found = cpu_vec_isa.x86_isa_checker()
    return [kind for kind in cpu_vec_isa.supported_vec_isa_list if all(word in found for word in str(kind).split())]


def _find_best() -> None:
    best = next(filter(bool, _offered()), None)
    if best is None:
        return
    kinds = cpu_vec_isa.supported_vec_isa_list
    cpu_vec_isa.supported_vec_isa_list = [best]
    try:
        cpu_vec_isa.valid_vec_isa_list()  # remembers what it returns
    finally:
        cpu_vec_isa.supported_vec_isa_list = kinds


def _find_all() -> None:
    give_way(19)  # the first step is computing now
    for kind in _offered():
        bool(kind)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
