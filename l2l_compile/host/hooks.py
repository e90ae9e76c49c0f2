"""Hooks on objects of the user that do not keep objects of this project alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..frontend.patches import is_replaced, replace


class WeakHook:
    """A hook that does not keep the object of its method alive. A copy and a pickle of it do nothing: they belong to no step."""

    def __init__(self, method: Callable | None):
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *arguments: Any) -> Any:
        alive = self._method() if self._method is not None else None
        return alive(*arguments) if alive is not None else None

    def __reduce__(self) -> tuple[type[WeakHook], tuple[None]]:
        return WeakHook, (None,)


def before(owner: Any, name: str, method: Callable[[], None]) -> Callable[[], None]:
    """Call `method` before every call of the owner's method `name`, which has no hooks. Returns a function that undoes this.

    Neither the owner nor the object of `method` is kept alive.
    """
    replaced = owner.__dict__.get(name)
    kept, hook = weakref.ref(owner), WeakHook(method)

    @functools.wraps(getattr(type(owner), name))
    def called(*arguments: Any, **named: Any) -> Any:
        hook()
        if replaced is not None:
            return replaced(*arguments, **named)
        return getattr(type(kept()), name)(kept(), *arguments, **named)

    def take_back() -> None:
        alive = kept()
        if alive is not None and alive.__dict__.get(name) is called:
            del alive.__dict__[name]
            if replaced is not None:
                alive.__dict__[name] = replaced

    owner.__dict__[name] = called
    return take_back


def put_around_those_of_the_user(optimizer: torch.optim.Optimizer, before_step: int, after_step: int) -> None:
    """Move two hooks of `step`, given by id, next to it: the last before, the first after.

    So they see changes of the user's pre-hooks, and changes of the user's post-hooks stay.
    """
    pre: Any = optimizer._optimizer_step_pre_hooks  # PyTorch's stubs say `dict`
    post: Any = optimizer._optimizer_step_post_hooks
    pre.move_to_end(before_step)
    post.move_to_end(after_step, last=False)


class Hearer(Protocol):
    """An object that is told of calls without hooks, as long as it is alive."""

    def before_zero_grad_of(self, module: torch.nn.Module) -> None:
        """Called before `module.zero_grad()` of any module."""

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after `optimizer.step()` of any optimizer."""

    def before_scaled_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before `GradScaler.step(optimizer)` of any enabled scaler."""


_hearers: weakref.WeakSet[Hearer] = weakref.WeakSet()


def hear(hearer: Hearer) -> None:
    """Call the methods of `hearer` from now on."""
    _hearers.add(hearer)
    zero, scaled = torch.nn.Module.zero_grad, torch.amp.GradScaler.step
    if is_replaced(zero):
        return

    @functools.wraps(zero)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        for each in list(_hearers):
            each.before_zero_grad_of(self)
        zero(self, set_to_none)

    @functools.wraps(scaled)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> float | None:
        for each in list(_hearers) if self.is_enabled() else ():
            each.before_scaled_step_of(optimizer)
        return scaled(self, optimizer, *arguments, **named)

    def stepped(optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        for each in list(_hearers):
            each.after_step_of(optimizer)

    register_optimizer_step_post_hook(stepped)
    replace(torch.nn.Module, "zero_grad", zero_grad)
    replace(torch.amp.GradScaler, "step", step)
