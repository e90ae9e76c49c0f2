"""What Dynamo keeps of a `torch.compile` call, and how it is taken back when nobody can use it any more.

Dynamo keeps what it has compiled with the code of the function, and the backend object of each call in a table of the process. An object
has the options of the call, with an optimizer among them, and that has parameters and their state: without this file, they would
stay for as long as the process runs.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._guards import TracingContext

from .patches import is_replaced, replace

_CODES, _CONTEXTS = "_l2l_codes", "_l2l_contexts"


def note_code(owner: Any, code: types.CodeType) -> None:
    """Dynamo looks at a function for the backend object of a call."""
    _noted(owner, _CODES).add(code)


def note_contexts(is_ours: Callable[[Any], bool]) -> None:
    """From now on, `in_use` knows of calls of `torch.compile` with a backend that `is_ours`."""
    original = eval_frame.OptimizeContext.__init__
    if is_replaced(original):
        return

    @functools.wraps(original)
    def init(self: Any, callback: Any, *arguments: Any, **named: Any) -> None:
        original(self, callback, *arguments, **named)
        owner = innermost_backend(callback)
        if is_ours(owner):
            _noted(owner, _CONTEXTS).add(self)

    replace(eval_frame.OptimizeContext, "__init__", init)


def in_use(owner: Any) -> bool:
    """Whether what a `torch.compile` call has returned is still there."""
    return len(_noted(owner, _CONTEXTS)) > 0


def forget(owner: Any) -> None:
    """Have Dynamo forget all that it has compiled for a call. A later call that is equal compiles again."""
    if eval_frame.cached_backends.get(id(owner)) is owner:
        del eval_frame.cached_backends[id(owner)]
    for code in list(_noted(owner, _CODES)):
        for entry in eval_frame._debug_get_cache_entry_list(code):
            guards = entry.guard_manager
            kept = guards.extra_state
            if kept is not None and entry.backend is not None and innermost_backend(entry.backend) is owner:
                kept.invalidate(entry, DeletedGuardManagerWrapper("nobody can call what was compiled"))
                # Dynamo keeps guards for as long as the functions that they name, and they keep what they compare with: meshes of
                # DTensors, and with a mesh its process groups.
                for held in ("root", "diff_guard_root", "closure_vars"):
                    setattr(guards, held, None)


class Entry:
    """What Dynamo gets of a program, and may keep for longer than anybody can call it.

    Dynamo lets go of it with the code that it has written, and PyTorch's flight recorder keeps the code of all functions that run when a
    collective begins, for thousands of collectives.
    """

    __slots__ = ("__weakref__", "_run", "_shapes")  # Dynamo copies what is in a `__dict__`

    def __init__(self, run: Callable):
        self._run: Callable | None = run
        context = TracingContext.try_get()
        self._shapes = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None

    def __call__(self, *arguments: Any) -> Any:
        assert self._run is not None, "nobody can call a program that was cleared"
        if self._shapes is not None:
            # Dynamo has made its guards from them. A fake tensor holds its sizes in C++, and a size holds the ShapeEnv: Python's
            # collector does not find that cycle.
            self._shapes.tracked_fakes = None
            self._shapes = None
        return self._run(*arguments)

    def clear(self) -> None:
        """Let go of the program."""
        self._run = None


class _Noted(weakref.WeakSet):
    """Nothing is noted of a copy, or a pickle."""

    def __reduce__(self) -> tuple[type[_Noted], tuple[()]]:
        return _Noted, ()


def _noted(owner: Any, name: str) -> _Noted:
    found = getattr(owner, name, None)
    if found is None:
        found = _Noted()
        setattr(owner, name, found)
    return found
