"""The adapter to what Dynamo and FX have once for all threads: the lock of a compilation, flags, the table of backends."""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.backends import registry
from torch.fx import _symbolic_trace

from l2l_compile import reentry
from l2l_compile.torch_internals.patches import is_replaced, replace


def apart_from_compilation() -> AbstractContextManager:
    """Context manager in which no other thread compiles, so `torch.compiler.is_compiling()`, one flag for all threads, is False.

    Waits until a running compilation ends. A thread that compiles must not wait for a thread that waits here.
    """
    return convert_frame.compile_lock


def compiles_here() -> bool:
    """Whether this thread compiles. If so, it must not wait for a thread that enters `apart_from_compilation`."""
    return convert_frame.compile_lock._is_owned()  # type: ignore[attr-defined]  # an RLock


def trace_beside_other_threads() -> None:
    """From now on, a compiled model may be called while another thread traces: `apart_from_compilation` has them take turns.

    FX notes in one flag for all threads that it traces, and Dynamo raises an error if a compiled model is called then.
    """
    original = _symbolic_trace.is_fx_symbolic_tracing
    if is_replaced(original):
        return

    @functools.wraps(original)
    @reentry.whole("a call of a compiled model")
    def is_fx_symbolic_tracing() -> bool:
        if not original() or _another_thread_compiles():
            return False
        reentry.check()
        return True

    replace(_symbolic_trace, "is_fx_symbolic_tracing", is_fx_symbolic_tracing)


def _another_thread_compiles() -> bool:
    lock = convert_frame.compile_lock
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def register_once() -> None:
    """From now on, threads may look up a backend for the first time at once: Dynamo would refuse the second one as a duplicate.

    These threads hold Dynamo's function already while they import this package. So its code is replaced, not its name.
    """
    function: Any = registry.register_backend
    if is_replaced(function):
        return
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )

    def register_backend(compiler_fn: Any = None, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        if compiler_fn is not None and registry._COMPILER_FNS.get(name) is compiler_fn:
            return compiler_fn
        return original(compiler_fn, name, *args, **kwargs)

    function.__globals__["_l2l_register"] = register_backend
    function.__defaults__, function.__code__ = None, _call_ours.__code__
    replace(registry, "register_backend", function)


def _call_ours(*args: Any, **kwargs: Any) -> Any:
    return _l2l_register(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 - of the module in which it runs
