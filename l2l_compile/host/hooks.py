"""Hooks on things of the user's that do not keep ours alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable) -> Callable:
    """A hook that does not keep the object of its method alive."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> Any:
        alive = reference()
        return alive(*arguments) if alive is not None else None

    return hook
