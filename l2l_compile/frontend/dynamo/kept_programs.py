"""Frees the memory that Dynamo keeps for a `torch.compile` call, once the compiled model is gone.

Dynamo keeps compiled code with the code object of the function. It keeps the backend object of each call in a table of the
process. This object holds the options of the call, which may have an optimizer with its parameters and their state. Without
this file, all these would stay for as long as the process runs.
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

from l2l_compile.memory.finalizers import members
from l2l_compile.torch_internals.patches import is_replaced, replace

_CODES, _CONTEXTS = "_l2l_codes", "_l2l_contexts"


def note_code(owner: Any, code: types.CodeType) -> None:
    """Note that Dynamo compiles the function with this code object for the backend object `owner`."""
    _noted(owner, _CODES).add(code)


def note_contexts(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook that notes the contexts of `torch.compile` calls whose backend `is_ours`; `in_use` reads these notes."""
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
    """Whether the object that a `torch.compile` call returned is still alive."""
    return len(_noted(owner, _CONTEXTS)) > 0


def forget(owner: Any) -> None:
    """Make Dynamo forget all that it compiled for a `torch.compile` call. A later equal call compiles again."""
    if eval_frame.cached_backends.get(id(owner)) is owner:
        del eval_frame.cached_backends[id(owner)]
    for code in members(_noted(owner, _CODES)):
        for entry in eval_frame._debug_get_cache_entry_list(code):
            guards = entry.guard_manager
            kept = guards.extra_state
            if kept is not None and entry.backend is not None and innermost_backend(entry.backend) is owner:
                kept.invalidate(entry, DeletedGuardManagerWrapper("nobody can call what was compiled"))
                # Dynamo keeps guards for as long as the functions that they name. Guards keep the objects that they compare
                # with, such as the mesh of a DTensor, and a mesh keeps its process groups.
                for held in ("root", "diff_guard_root", "closure_vars"):
                    setattr(guards, held, None)


class Entry:
    """The callable that Dynamo gets for a program. It can be cleared, because Dynamo may keep it after its last call.

    Dynamo frees it together with the code that it wrote for the function. PyTorch's flight recorder keeps the code of all
    functions that run when a collective begins, for thousands of collectives.
    """

    __slots__ = ("__weakref__", "_run", "_shapes")  # slots, because Dynamo copies the contents of a `__dict__`

    def __init__(self, run: Callable):
        self._run: Callable | None = run
        context = TracingContext.try_get()
        self._shapes = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None

    def __call__(self, *arguments: Any) -> Any:
        assert self._run is not None, "nobody can call a program that was cleared"
        if self._shapes is not None:
            # Dynamo has already made its guards from these fake tensors. A fake tensor holds its sizes in C++, and a size holds
            # the ShapeEnv: Python's collector does not find that cycle.
            self._shapes.tracked_fakes = None
            self._shapes = None
        return self._run(*arguments)

    def clear(self) -> None:
        """Drop the reference to the program."""
        self._run = None


class _Noted(weakref.WeakSet):
    """A weak set whose copy, or pickle, is empty."""

    def __reduce__(self) -> tuple[type[_Noted], tuple[()]]:
        return _Noted, ()


def _noted(owner: Any, name: str) -> _Noted:
    found = getattr(owner, name, None)
    if found is None:
        found = _Noted()
        setattr(owner, name, found)
    return found
