"""Functions with new code objects, so that Dynamo compiles them anew."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_numbers = itertools.count()


def fresh_caller() -> Callable:
    """A function that calls its first argument. It has a new code object, because Dynamo caches by code object."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_numbers)}")
    return types.FunctionType(code, globals())


@dataclass(frozen=True, repr=False)
class WithoutArguments:
    """A function that waits for the arguments of the model. Its text says so: `print(explain(model))` lacks a call."""

    function: Callable
    usage: str  # such as `explain(model)`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.usage} has no arguments of the model yet: call it with a batch, {self.usage}(**batch)>"
