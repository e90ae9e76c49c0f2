"""Parameters that are asked for something which overlapped updates do not keep where PyTorch keeps it.

Between a backward and the next forward, the caller may read `p.grad` (`clip_grad_norm_` does), or entries of a parameter whose
update is under way. PyTorch has no hook for either. So each of these parameters gets a subclass of its own class meanwhile:

gradients  a subclass with a property `grad`. Operations on the parameter run as before
entries    a subclass that also has `__torch_function__`, which PyTorch calls before it reads the parameter

Dynamo's guards know a parameter by its class. Every parameter has its own class again before compiled code is called, and while
it runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from l2l_compile.memory.finalizers import members
from l2l_compile.torch_internals.calls import backend_of, is_frame_of_region, streams, watch_regions
from l2l_compile.torch_internals.threads import compiles_here
from l2l_compile.user_line import OURS

_RUNTIME = os.path.join(OURS, "runtime") + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Watcher(Protocol):
    """An object that is asked in the place of parameters."""

    def read_gradient(self, parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor | None:
        """`p.grad` is read; `own` is the tensor there. Returns the tensor that is there from now on."""

    def write_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """`p.grad` is about to be set."""

    def before_reading(self) -> None:
        """Entries of a parameter are about to be read or written."""

    def before_compiled_code(self) -> None:
        """Compiled code of another backend is about to run, which may read or write entries of parameters, or step the optimizer."""

    def hand_over(self) -> None:
        """Put the gradients of the step to `p.grad`, if it has them: code that is not watched may read them there."""

    def cannot_watch(self, count: int) -> None:
        """So many parameters, whose gradients are to be watched, cannot be."""

    def is_at_work(self) -> bool:
        """Whether this thread is one of those that update."""

    def watch_again(self) -> None:
        """Watch the parameters that are to be watched now: compiled code has run."""


class ParameterWatch:
    """The parameters that one watcher watches.

    waits_for_entries  whether entries of some are watched
    ever               all parameters that were watched so far
    """

    def __init__(self, watcher: Watcher):
        self._watcher = weakref.ref(watcher)
        self._classes: dict[tuple[type, bool], type | None] = {}
        self._watched: dict[torch.Tensor, type] = {}  # each with its own class
        self.ever: set[torch.Tensor] = set()
        self.waits_for_entries = False
        self._thread = threading.get_ident()

    @property
    def is_on(self) -> bool:
        """Whether a parameter is watched."""
        return bool(self._watched)

    def begin(self, gradients: Iterable[torch.Tensor], entries: Iterable[torch.Tensor]) -> None:
        """Watch gradients of the former and entries of the latter, in place of all before.

        Nothing is watched within compiled code, or while a program runs.
        """
        self.end()
        if _unread.get():
            return
        self._thread = threading.get_ident()
        _watches.add(self)
        if compiles_here() or _is_inside(sys._getframe(1)):
            return
        with_entries = set(entries)
        for parameter in with_entries:
            self.waits_for_entries |= self._watch(parameter, entries=True)
        gradients = set(gradients)
        for parameter in gradients - with_entries:
            self._watch(parameter, entries=False)
        left, watcher = [p for p in gradients if not _can_be_watched(p)], self._watcher()
        if left and watcher is not None:
            watcher.cannot_watch(len(left))
        self.ever.update(self._watched)

    def _watch(self, parameter: torch.Tensor, entries: bool) -> bool:
        """Watch a parameter. False if that is not possible, or done by another watcher."""
        own = type(parameter)
        kind = self._class_for(own, entries)
        if kind is None:
            return False
        while parameter not in self._watched or type(parameter) is own:  # again if a signal handler has ended it half-way
            self._watched[parameter] = own
            parameter.__class__ = kind
        return True

    def end(self) -> None:
        """Watch nothing."""
        self.waits_for_entries = False
        while self._watched:
            for parameter, own in list(self._watched.items()):
                parameter.__class__ = own
                self._watched.pop(parameter, None)
                parameter.__class__ = own  # a signal handler may have watched it again before it was removed

    def end_for_others(self) -> None:
        """End before code runs that reads parameters as they are: wait for their updates, and hand gradients over."""
        watcher = self._watcher()
        if watcher is not None and not watcher.is_at_work():
            if self.waits_for_entries:
                watcher.before_compiled_code()
            watcher.hand_over()
        self.end()

    def again(self) -> None:
        """Compiled code has run on this thread."""
        watcher = self._watcher()
        if watcher is not None and not self._watched and self._thread == threading.get_ident():
            watcher.watch_again()

    def _class_for(self, own: type, entries: bool) -> type | None:
        """The class that a watched parameter has; None if it is watched already, or if its class answers by itself."""
        if (own, entries) not in self._classes:
            made = _watched_class(own, self._watcher, entries) if own not in _own_class and _is_plain(own) else None
            self._classes[own, entries] = made
            if made is not None:
                _own_class[made] = own
        return self._classes[own, entries]


def suspend() -> None:
    """Watch nothing on this thread: a program is about to run, which waits for updates by itself."""
    here = threading.get_ident()
    for watch in members(_watches):
        if watch._thread == here:
            watch.end()


def _suspend_for(callback: Any) -> None:
    """Compiled code is about to run, of the `torch.compile` call with this callback."""
    for watch in members(_watches):
        if watch._watched and _concerns(callback, watch):
            watch.end() if streams(callback) else watch.end_for_others()


def _concerns(callback: Any, watch: ParameterWatch) -> bool:
    """Whether compiled code on this thread may read parameters that are watched. False if it is another training on another thread."""
    session = getattr(backend_of(callback), "_l2l_session", None)
    theirs = getattr(session.server.updates, "_watch", None) if session is not None else None
    is_other = theirs is not None and theirs is not watch and theirs.ever.isdisjoint(watch._watched)
    return watch._thread == threading.get_ident() or not is_other


def _resume() -> None:
    """Compiled code has run on this thread."""
    for watch in members(_watches):
        watch.again()


_watches: weakref.WeakSet[ParameterWatch] = weakref.WeakSet()
_own_class: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()  # of a class that is made here


def watch_compiled_code() -> None:
    """Have parameters be watched outside of compiled code alone, from now on."""
    watch_regions(_suspend_for, _resume)


@contextlib.contextmanager
def nothing_is_read() -> Iterator[None]:
    """Context manager in which no parameter is watched: a loop of this package runs, which reads none while it may be updated."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


_unread = contextvars.ContextVar("nothing_is_read", default=False)


def unwatched() -> contextlib.AbstractContextManager:
    """Context manager in which this thread reads parameters as they are. It spares PyTorch the calls of `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def is_read_by(*names: str) -> bool:
    """Whether the code of PyTorch that reads a gradient now is a function of one of these names."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH) and frame.f_code.co_name in names


def _is_inside(frame: types.FrameType | None) -> bool:
    """Whether a frame is called from compiled code, or from a program that runs.

    The frames of this package at the end of the chain, and the one that leaves compiled code, do not count.
    """
    while frame is not None and frame.f_code.co_filename.startswith(OURS) and not frame.f_code.co_filename.startswith(_RUNTIME):
        frame = frame.f_back
    if frame is not None and is_frame_of_region(frame):
        frame = frame.f_back
    while frame is not None:
        if frame.f_code.co_filename.startswith(_RUNTIME) or is_frame_of_region(frame):
            return True
        frame = frame.f_back
    return False


def is_within_compiled_code() -> bool:
    """Whether compiled code has called the code of this package that runs now."""
    return _is_inside(sys._getframe(1))


def _can_be_watched(parameter: torch.Tensor) -> bool:
    return type(parameter) in _own_class or _is_plain(type(parameter))


def _is_plain(kind: type) -> bool:
    """Whether operations on tensors of a class go to PyTorch without a `__torch_function__` of the class."""
    return kind is not torch.Tensor and getattr(kind, "__torch_function__", None) is torch._C._disabled_torch_function_impl


def _watched_class(own: Any, watcher: weakref.ref[Watcher], entries: bool) -> type:
    """A subclass of a class of parameters, through which a watcher is asked. It looks like the class in messages."""
    contents = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__new__": lambda cls, *arguments, **named: own(*arguments, **named),
        "grad": _watched_gradient(own, watcher),
        **_copies(own, watcher if entries else lambda: None),
    }
    if entries:
        contents["__torch_function__"] = classmethod(functools.partial(_call, watcher))
    return types.new_class(own.__name__, (own,), {}, lambda namespace: namespace.update(contents))


def _watched_gradient(own: Any, watcher: weakref.ref[Watcher]) -> property:
    """The property `grad` of a class."""

    def read(self: Any) -> torch.Tensor | None:
        asked = watcher()
        with torch._C.DisableTorchFunctionSubclass():
            before = own.grad.__get__(self, own)
        # Dynamo looks at the gradients of the parameters that it meets while it traces, and so does each fake tensor of a parameter.
        is_traced = compiles_here() or is_read_by("safe_grad")
        found = asked.read_gradient(self, before) if asked is not None and not is_traced else before
        if found is not before:
            _set(self, found)
        return found

    def write(self: Any, gradient: torch.Tensor | None) -> None:
        asked = watcher()
        if asked is not None:
            asked.write_gradient(self, gradient)
        _set(self, gradient)

    def _set(self: Any, gradient: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            own.grad.__set__(self, gradient)

    return property(read, write, lambda self: write(self, None))


def _copies(own: Any, watcher: Callable[[], Watcher | None]) -> dict[str, Callable]:
    """The methods by which a parameter is copied, pickled and printed: in its own class, behind its update."""

    def wait() -> None:
        asked = watcher()
        if asked is not None and not asked.is_at_work():
            asked.before_reading()

    def deep_copy(self: Any, memo: dict) -> Any:
        wait()
        with _in_its_own_class(self, own):
            return copy.deepcopy(self, memo)

    def reduce(self: Any, protocol: int) -> Any:
        wait()
        with _in_its_own_class(self, own):
            return self.__reduce_ex__(protocol)

    def text(self: Any, **named: Any) -> str:
        wait()
        with _in_its_own_class(self, own):
            return own.__repr__(self, **named)

    return {"__deepcopy__": deep_copy, "__reduce_ex__": reduce, "__repr__": text}


def _call(
    watcher: weakref.ref[Watcher], cls: type, function: Callable, kinds: Any, arguments: tuple = (), named: dict | None = None
) -> Any:
    """PyTorch is about to call a function with a parameter whose entries are watched."""
    asked = watcher()
    if asked is None or asked.is_at_work() or function in _WITHOUT_ENTRIES or compiles_here():
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(named or {}))
    asked.before_reading()  # behind this, entries are not watched
    return function(*arguments, **(named or {}))


@contextlib.contextmanager
def _in_its_own_class(parameter: Any, own: type) -> Iterator[None]:
    now = type(parameter)
    parameter.__class__ = own
    try:
        yield
    finally:
        if now in _own_class and any(parameter in watch._watched for watch in members(_watches)):
            parameter.__class__ = now


_ATTRIBUTES = (
    *("requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad", "grad_fn", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps"),
    *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "_base", "grad_dtype"),
)
_METHODS = (
    *(
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "is_contiguous",
        "is_complex",
    ),
    *("is_floating_point", "is_inference", "is_shared", "is_pinned", "requires_grad_", "register_hook", "get_device", "__len__"),
    *("register_post_accumulate_grad_hook", "__hash__"),
)
# Functions that read no entry of a parameter.
_WITHOUT_ENTRIES = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # PyTorch's stubs say bool
    *(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)),
}
