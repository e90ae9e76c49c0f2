"""The adapter to calls of compiled functions, before Dynamo looks at its guards and behind it."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import eval_frame, external_utils, guards
from torch._dynamo.eval_frame import innermost_backend

from l2l_compile import reentry
from l2l_compile.torch_internals.patches import is_replaced, replace


def look_at_calls(is_ours: Callable[[Any], bool], called: Callable[[Any], None]) -> None:
    """From now on, a `torch.compile` call with a backend that `is_ours` calls `called` with the backend object of the call.

    An error of `called` is raised by the `torch.compile` call. The backend itself is called only with the first graph, which
    may be much later.
    """
    original = eval_frame.get_compiler_fn
    if is_replaced(original):
        return

    @functools.wraps(original)
    def get_compiler_fn(compiler_fn: Any) -> Any:
        if is_ours(compiler_fn):
            called(compiler_fn)
        return original(compiler_fn)

    replace(eval_frame, "get_compiler_fn", get_compiler_fn)


def watch_regions(entered: Callable[[Any], None], left: Callable[[], None]) -> None:
    """From now on, `entered` is called with its callback before any compiled function looks at its guards, and `left` after it.

    `left` is also called where a part of compiled code, or other code, runs under `torch.compiler.disable`.
    """
    if (entered, left) not in _watching_regions:
        _watching_regions.append((entered, left))
    original = eval_frame._maybe_set_eval_frame
    if is_replaced(original):
        return

    @functools.wraps(original)
    def set_callback(callback: Any) -> Any:
        if is_frame_of_region(frame := sys._getframe(1)):
            if callback is not None and not _calls.is_noted(frame):
                _look_at(frame, backend_of(callback))
            _calls.begins_or_ends(frame, callback)
        if callback is not None:
            for entering, _ in _watching_regions:
                entering(callback)
            return original(callback)
        before = original(callback)
        for _, leaving in _watching_regions:
            leaving()
        return before

    replace(eval_frame, "_maybe_set_eval_frame", set_callback)


_watching_regions: list[tuple[Callable[[Any], None], Callable[[], None]]] = []


@dataclass(frozen=True)
class CompiledCall:
    """A call of a compiled function that is about to begin."""

    frame: types.FrameType = field(repr=False)

    @property
    def function(self) -> Callable:
        """What was compiled: a function or a method, or the module of a compiled module."""
        found = self.frame.f_locals["fn"]
        if getattr(found, "__code__", None) is not None and found.__code__.co_filename == external_utils.__file__:
            found = inspect.unwrap(found, stop=lambda function: function.__code__.co_filename != external_utils.__file__)
        owner = getattr(found, "__self__", None)
        return owner if isinstance(owner, torch.nn.Module) and getattr(found, "__name__", "") in _CALLS_MODULE else found

    @property
    def compiled_in_place(self) -> torch.nn.Module | None:
        """The module that `module.compile()` has compiled; None for another call."""
        found = self.frame.f_locals["fn"]
        owner = getattr(found, "__self__", None)
        return owner if isinstance(owner, torch.nn.Module) and getattr(found, "__name__", "") == "_call_impl" else None

    @property
    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        names = self.frame.f_locals
        return names["args"], names["kwargs"]


_CALLS_MODULE = ("__call__", "_wrapped_call_impl", "_call_impl")


def look_before_calls(is_ours: Callable[[Any], bool], called: Callable[[Any, CompiledCall], None]) -> None:
    """From now on, `called` gets the backend object and the call before a compiled function runs, if its backend `is_ours`.

    An error of `called` is raised by the call.
    """
    _before_calls.append((is_ours, called))
    watch_regions(_nothing, _nothing)


def _look_at(frame: types.FrameType, backend: Any) -> None:
    """Let those look at a call who asked for calls of its backend."""
    looks = [called for is_ours, called in _before_calls if is_ours(backend)]
    if looks:
        with _undone_on_error(frame):
            for called in looks:
                called(backend, CompiledCall(frame))


@contextmanager
def _undone_on_error(frame: types.FrameType) -> Iterator[None]:
    """Context manager within PyTorch's frame around a call: an error leaves PyTorch's settings as they were before the call.

    PyTorch has changed them by then, and changes them back behind the call. Graphs that are compiled meanwhile are not those of the call.
    """
    names = frame.f_locals
    try:
        yield
        if names.get("fullgraph_count_enabled"):
            eval_frame.set_fullgraph_compiled_frame_count(0)
    except BaseException:
        for name, setter in _SETTINGS:
            if names.get(name) is not None and hasattr(eval_frame, setter):
                getattr(eval_frame, setter)(names[name])
        for cleanup in names.get("cleanups", ()):
            cleanup()
        raise


_SETTINGS = (  # what PyTorch's frame keeps of the settings before a call, and the function that sets each
    ("prior_error_on_graph_break", "_set_error_on_graph_break"),
    ("prior_error_on_nested_compile", "set_fullgraph_error_on_nested_compile"),
    ("prior_eval_frame_override", "set_eval_frame_override"),
    ("prior_skip_guard_eval_unsafe", "set_skip_guard_eval_unsafe"),
    ("prior_isolate_recompiles_id", "set_eval_frame_isolate_recompiles_id"),
)


def _nothing(*_: Any) -> None:
    """For calls alone."""


_before_calls: list[tuple[Callable[[Any], bool], Callable[[Any, CompiledCall], None]]] = []


def refuse_calls_within_dynamo(is_ours: Callable[[Any], bool]) -> None:
    """From now on, a compiled function is refused in the middle of Dynamo's own work, if its backend `is_ours`.

    Dynamo holds a lock while it looks at guards, some of which are Python functions: a signal handler that runs there and calls
    the model would wait for that lock for ever. It takes programs apart in `reset`, where a call would read what is gone.
    """

    def check(callback: Any) -> None:
        if threading.current_thread() is threading.main_thread() and is_ours(backend_of(callback)):
            reentry.check_not_within(_work_of_dynamo)

    watch_regions(check, lambda: None)
    _refuse_eager_calls(is_ours)


def _refuse_eager_calls(is_ours: Callable[[Any], bool]) -> None:
    """From PyTorch 2.15 on, a compiled function that is called while Dynamo runs an operation on fake tensors runs uncompiled.

    A model of this backend is refused there: PyTorch would fail on its parameters, which are no fake tensors.
    """
    original = getattr(eval_frame, "_is_eager_on_nested_compile", None)
    if original is None or is_replaced(original):
        return

    @functools.wraps(original)
    def is_eager() -> bool:
        around, eager = sys._getframe(1), original()
        if eager and is_frame_of_region(around) and is_ours(backend_of(around.f_locals.get("callback"))):
            eval_frame.set_eval_frame(around.f_locals["prior"])  # as `compile_wrapper` does at its end
            reentry.refuse("a compilation")
        return eager

    replace(eval_frame, "_is_eager_on_nested_compile", is_eager)


def _work_of_dynamo(code: types.CodeType) -> str | None:
    """What Dynamo does in a function: one of its guards, which it writes as text, or `reset`. None for any other function."""
    if code.co_filename == guards.__file__ or code.co_filename == "<string>" and code.co_name == "guard":
        return "a look at Dynamo's guards"
    return "torch._dynamo.reset()" if code is _RESET else None


_RESET = torch._dynamo.reset_code_caches.__code__


class _Calls(threading.local):
    """The calls of compiled functions that run on a thread, outermost first: PyTorch's frame around each, its number, its callback."""

    def __init__(self) -> None:
        self.running: dict[types.FrameType, tuple[int, Any]] = {}

    def is_noted(self, frame: types.FrameType) -> bool:
        return frame in self.running

    def begins_or_ends(self, frame: types.FrameType, callback: Any) -> None:
        """Note that PyTorch sets the callback in its frame around a call: when the call begins, and again when it ends."""
        if self.running.pop(frame, None) is None and callback is not None:
            if self.running:  # a handler of a signal may have raised before PyTorch could end a call
                stack = {f for f, _ in traceback.walk_stack(frame)}
                self.running = {f: call for f, call in self.running.items() if f in stack}
            self.running[frame] = next(_numbers), callback


_calls = _Calls()
_numbers = itertools.count(1)


def number_of_call() -> int:
    """The number of the innermost call of a compiled function that runs on this thread, counted over all threads; 0 for none."""
    number, _ = next(reversed(_calls.running.values()), (0, None))
    return number


def backend_of_call() -> Any:
    """The backend object of the innermost call of a compiled function that runs on this thread; None for none."""
    _, callback = next(reversed(_calls.running.values()), (0, None))
    return backend_of(callback)


def is_running(number: int) -> bool:
    """Whether the call of a compiled function with a number still runs on this thread."""
    return any(number == running for running, _ in _calls.running.values())


def is_frame_of_region(frame: types.FrameType) -> bool:
    """Whether a frame is PyTorch's own around a compiled function."""
    return frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == eval_frame.__file__


def backend_of(callback: Any) -> Any:
    """The backend object of the `torch.compile` call with a callback of Dynamo, as `watch_regions` hands it over; None for none."""
    return innermost_backend(callback) if callable(callback) else None


def streams_layers(backend: Any) -> bool:
    """Whether a backend, or the wrapper that `torch.compile` made for it, belongs to this package (`explain`'s included)."""
    return getattr(getattr(backend, "compiler_fn", backend), "streams_layers", False)


def streams(callback: Any) -> bool:
    """Whether a callback of Dynamo belongs to this backend."""
    return streams_layers(backend_of(callback))
