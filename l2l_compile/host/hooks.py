"""Hooks on objects of the user that do not keep objects of this project alive."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from l2l_compile.memory.finalizers import members, taken
from l2l_compile.torch_internals.patches import is_replaced, replace


class WeakHook:
    """A hook that does not keep the object of its method alive. A copy and a pickle of it do nothing: they belong to no step."""

    def __init__(self, method: Callable | None):
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        alive = self._method() if self._method is not None else None
        return alive(*arguments, **named) if alive is not None else None

    def __reduce__(self) -> tuple[type[WeakHook], tuple[None]]:
        return WeakHook, (None,)


class StepHook(WeakHook):
    """A hook on calls that end or begin a step. Code that Dynamo compiles around the call stops there, and goes on behind it."""

    @torch.compiler.disable(
        reason="the option optimizer has a part in this call: leave the call out of what fullgraph=True compiles"
    )
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return super().__call__(*arguments, **named)


_left: deque[Callable[[], object]] = deque()


def remove_with(owner: object, remove: Callable[[], object]) -> None:
    """Have `remove` take hooks away after `owner` is gone, in the next call of `remove_left`.

    A finalizer must not do it: PyTorch may be walking over the hooks.
    """
    weakref.finalize(owner, _left.append, remove)


def remove_left() -> None:
    """Take hooks away whose owners are gone. Called while no hook runs."""
    for remove in taken(_left):
        remove()


def before(owner: Any, name: str, method: Callable[..., None]) -> Callable[[], None]:
    """Call `method` before every call of the owner's method `name`, which has no hooks. Returns a function that undoes this.

    `method` gets the arguments of the call. Neither the owner nor the object of `method` is kept alive.
    """
    replaced = owner.__dict__.get(name)
    kept, hook = weakref.ref(owner), StepHook(method)

    @functools.wraps(getattr(type(owner), name))
    def called(*arguments: Any, **named: Any) -> Any:
        hook(*arguments, **named)
        if replaced is not None:
            return replaced(*arguments, **named)
        return getattr(type(kept()), name)(kept(), *arguments, **named)

    def undo() -> None:
        alive = kept()
        if alive is not None and alive.__dict__.get(name) is called:
            del alive.__dict__[name]
            if replaced is not None:
                alive.__dict__[name] = replaced

    owner.__dict__[name] = called
    return undo


def wrap_user_hooks(optimizer: torch.optim.Optimizer, before_step: int, after_step: int) -> None:
    """Move two hooks of `step`, given by id, next to it: the last before, the first after.

    So they see changes of the user's pre-hooks, and changes of the user's post-hooks stay.
    """
    pre: Any = optimizer._optimizer_step_pre_hooks  # PyTorch's stubs say `dict`
    post: Any = optimizer._optimizer_step_post_hooks
    pre.move_to_end(before_step)
    post.move_to_end(after_step, last=False)


def running_steps(of: torch.optim.Optimizer | None = None) -> int:
    """How many calls of `step` this thread is in, of one optimizer or of all. A step may call the step of its base class.

    The stack says so: a counter would be wrong behind an interrupt, or where threads share it.
    """
    return sum(of is None or frame.f_locals.get("self", of) is of for frame in _frames_of(_STEP))


def step_of_a_copy(step: Callable[..., Any], optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    """Call `step` of a copy of the user's optimizer. No listener is told, whatever other steps that one calls."""
    return step(optimizer, *arguments)


def _frames_of(code: types.CodeType) -> Iterator[types.FrameType]:
    """The frames of this thread that run a function. Dynamo replaces its code by code of the same name and file."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == code.co_name and frame.f_code.co_filename == code.co_filename:
            yield frame
        frame = frame.f_back


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # the function that runs hooks around a step
_STEP_OF_A_COPY = step_of_a_copy.__code__


def optimizers_of(parameters: Collection[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """All optimizers of the process that hold one of these parameters. Takes a look at all of Python's objects."""
    alive = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [o for o in alive if any(p in parameters for group in getattr(o, "param_groups", ()) for p in group["params"])]


class Listener(Protocol):
    """A listener, held weakly, for calls that PyTorch has no hook for."""

    def before_zero_grad_of(self, module: torch.nn.Module, set_to_none: bool) -> None:
        """Called before `module.zero_grad()` of any module."""

    def before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before `optimizer.step()` of any optimizer."""

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after `optimizer.step()` of any optimizer."""

    def before_scaled_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before `GradScaler.step(optimizer)` of any enabled scaler."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def subscribe(listener: Listener) -> None:
    """Install the hooks, and add a listener to them."""
    _listeners.add(listener)
    zero, scaled = torch.nn.Module.zero_grad, torch.amp.GradScaler.step
    if is_replaced(zero):
        return

    @functools.wraps(zero)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        for each in members(_listeners):
            each.before_zero_grad_of(self, set_to_none)
        zero(self, set_to_none)

    @functools.wraps(scaled)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> float | None:
        for each in members(_listeners) if self.is_enabled() else ():
            each.before_scaled_step_of(optimizer)
        return scaled(self, optimizer, *arguments, **named)

    register_optimizer_step_pre_hook(_tell_before)
    register_optimizer_step_post_hook(_tell_behind)
    replace(torch.nn.Module, "zero_grad", zero_grad)
    replace(torch.amp.GradScaler, "step", step)


def _tell_before(optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
    for each in _listening():
        each.before_step_of(optimizer)


def _tell_behind(optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
    for each in _listening():
        each.after_step_of(optimizer)


def _listening() -> Iterable[Listener]:
    """The listeners; none in the step of a copy, and none while Dynamo traces: steps of other optimizers stay one graph."""
    return () if torch.compiler.is_compiling() or any(_frames_of(_STEP_OF_A_COPY)) else members(_listeners)
