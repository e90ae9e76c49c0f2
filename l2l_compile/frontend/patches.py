"""Functions of PyTorch that this package replaces by its own, each once in a process."""

from __future__ import annotations

from collections.abc import Callable

_MARK = "_l2l"


def replace(owner: object, name: str, by: Callable) -> None:
    """Put a function in the place of the one that a class or module has under a name; `is_replaced` then says so."""
    setattr(by, _MARK, True)
    setattr(owner, name, by)


def is_replaced(function: Callable) -> bool:
    """Whether `replace` has put a function where it is."""
    return hasattr(function, _MARK)
