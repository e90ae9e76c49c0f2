"""The error with which a process ends, if nothing has caught it.

Python keeps it in `sys.last_value`. A process of `multiprocessing` prints it and keeps it nowhere: there, it is the one that is raised while
the finalizers of `multiprocessing` run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from multiprocessing import util

_of_target: list[BaseException] = []  # at most one: a process of `multiprocessing` has one target


def uncaught() -> BaseException | None:
    """The error with which this process ends; None before its end, or without one."""
    last = getattr(sys, "last_value", None)
    return last if last is not None else next(iter(_of_target), None)


@functools.cache
def look_at_target(process: int, then: Callable[[], None]) -> None:
    """From now on, `uncaught` knows the error of the target of a process of `multiprocessing`, and calls `then` behind it.

    `process` is the number of this process: a fork drops the finalizers of `multiprocessing`.
    """
    util.Finalize(None, functools.partial(_look, then), exitpriority=0)


def _look(then: Callable[[], None]) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # `torch.multiprocessing.spawn` exits behind the error of its target
        error = (error.__context__ or error) if error.code else None
    if error is not None:
        _of_target[:] = [error]
        then()
