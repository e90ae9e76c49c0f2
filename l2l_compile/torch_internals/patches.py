"""Replaces functions of PyTorch by functions of this package, each once per process."""

from __future__ import annotations

from collections.abc import Callable

_MARK = "_l2l"


def replace(owner: object, name: str, by: Callable) -> None:
    """Set attribute `name` of a class or module to the function `by`, and mark `by` for `is_replaced`."""
    setattr(by, _MARK, True)
    setattr(owner, name, by)


def is_replaced(function: Callable) -> bool:
    """Whether a function is one that `replace` has set."""
    return hasattr(function, _MARK)
