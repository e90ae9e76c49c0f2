"""Functions with new code objects, so that Dynamo compiles them anew."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable

_numbers = itertools.count()


def fresh_caller() -> Callable:
    """A function that calls its first argument. It has a new code object, because Dynamo caches by code object."""

    def call(self, *args, **kwargs):
        return self(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_numbers)}")
    return types.FunctionType(code, globals())
