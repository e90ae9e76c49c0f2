"""Refuses calls that a signal handler makes in the middle of another call of this package.

Python runs a signal handler between any two steps of the main thread. If that thread is within a step, it may hold a lock that
the host lane needs, and some layers may be updated already: a handler that waits for the updates would wait for ever, and what
it saves would be half of a step. So such a call raises `ReentryError`, whose text names the pattern that works.

A call is refused if a function that is marked by `whole` is on the stack of its thread. The stack needs no counter, which an
interrupt could leave wrong. Calls within this package are legal there: they call functions that do not check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NoReturn, TypeVar

from l2l_compile.errors import ReentryError

_Function = TypeVar("_Function", bound=Callable)
_whole: dict[int, str] = {}  # by the id of a code object: code of Dynamo may have constants that have no hash
_kept: list[CodeType] = []  # so that no other code object gets one of these ids
COMPILATION = "a compilation"  # in which operations of this thread make fake tensors


def whole(what: str) -> Callable[[_Function], _Function]:
    """The decorated function runs as a whole: `check` refuses calls within it. `what` names it in the error."""

    def mark(function: _Function) -> _Function:
        _whole[id(function.__code__)] = what
        _kept.append(function.__code__)
        return function

    return mark


def running() -> str | None:
    """What this thread is in the middle of, besides the caller of this function; None for nothing."""
    return _first_above(sys._getframe(1))


def check(within: str | None = None) -> None:
    """Raise `ReentryError` if the function that calls this was called in the middle of another one that runs as a whole.

    With `within`, only if that is its name.
    """
    caller = sys._getframe(1)
    found = _first_above(caller)
    if found is not None and within in (None, found):
        raise _error(_whole.get(id(caller.f_code), caller.f_code.co_name), found)


def check_not_within(work: Callable[[CodeType], str | None]) -> None:
    """Raise `ReentryError` if this thread is within a function for which `work` has a name, which is in the error."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if (what := work(frame.f_code)) is not None:
            raise _error("a call of the model", what)
        frame = frame.f_back


def refuse(what: str) -> NoReturn:
    """Raise `ReentryError` for a call of the model in the middle of this."""
    raise _error("a call of the model", what)


def _error(begun: str, found: str) -> ReentryError:
    return ReentryError(
        f"{begun} within {found}, which is not over: a signal handler has called it in the middle of a step. What it would save is "
        "half of a step. Let the handler set a flag alone, and save behind optimizer.step(): "
        "docs/saving.md has an example"
    )


def _first_above(frame: FrameType) -> str | None:
    above = frame.f_back
    while above is not None:
        found = _whole.get(id(above.f_code))
        if found is not None:
            return found
        above = above.f_back
    return None
