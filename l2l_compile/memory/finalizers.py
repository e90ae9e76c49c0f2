"""Finalizers note what is gone, and the next call clears it.

Python may run `__del__`, a callback of a weak reference or `weakref.finalize` at any allocation, on any thread. The thread may
hold a lock then, or walk over a dictionary. A finalizer that took the same lock would wait for ever, and one that changed the
dictionary would end the walk with an error. Therefore a finalizer of this package only appends to a `deque`, which is one step:

    finalizer:      notes.append(what is gone)
    next call:      with the lock, for each in taken(notes): clear it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

_Note = TypeVar("_Note")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def taken(notes: deque[_Note]) -> Iterator[_Note]:
    """Take notes out, the oldest first, until there are none. More may be added meanwhile, and another thread may take some."""
    while notes:
        try:
            note = notes.popleft()
        except IndexError:
            return
        yield note


def members(weak: WeakSet[_Key]) -> list[_Key]:
    """The living members of a weak set. Another thread may add members meanwhile, which ends a plain walk with an error."""
    references: Any = tuple(weak.data)  # type: ignore[attr-defined]  # the stubs lack it
    return [member for reference in references if (member := reference()) is not None]


def items(weak: WeakKeyDictionary[_Key, _Value]) -> list[tuple[_Key, _Value]]:
    """The items of a weak dictionary whose keys are alive; as `members`."""
    pairs: Any = tuple(weak.data.items())  # type: ignore[attr-defined]  # the stubs lack it
    return [(key, value) for reference, value in pairs if (key := reference()) is not None]
