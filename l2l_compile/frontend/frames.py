"""Room for the frames of Python's functions, while a program is made.

Python keeps the frames of a thread in chunks of 16 KiB. The call that finds its chunk full takes another one from the operating
system, and its return gives that back: a tenth of the time of a compilation, where calls by the thousand are made at such a depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_room(function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """What `function` returns: the frames below it share one chunk. Memory that they do not use is not touched."""
    return function(*args, **kwargs)


# A frame that says it needs 66,000 words takes a chunk of 1 MiB, the next power of two, and leaves half of it.
with_room.__code__ = with_room.__code__.replace(co_stacksize=66_000)
