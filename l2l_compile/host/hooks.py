"""Hooks on things of the user's that do not keep ours alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..frontend.patches import is_replaced, replace


def weakly(method: Callable) -> Callable:
    """A hook that does not keep the object of its method alive."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> Any:
        alive = reference()
        return alive(*arguments) if alive is not None else None

    return hook


def before(owner: Any, name: str, method: Callable[[], None]) -> Callable[[], None]:
    """Have a method called before one of the owner's, each time that is called. What this returns takes it back.

    For what has no hooks. Neither the owner nor the object of the method is kept alive.
    """
    replaced = owner.__dict__.get(name)
    kept, hook = weakref.ref(owner), weakly(method)

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
    """Our hooks of `step`, by their ids, are the last before it and the first behind it: what the user's change is seen, and stays."""
    optimizer._optimizer_step_pre_hooks.move_to_end(before_step)
    optimizer._optimizer_step_post_hooks.move_to_end(after_step, last=False)


class HearsOfZeroGrad(Protocol):
    def before_zero_grad_of(self, module: torch.nn.Module) -> None: ...


_hearers: weakref.WeakSet[HearsOfZeroGrad] = weakref.WeakSet()


def before_zero_grad(hearer: HearsOfZeroGrad) -> None:
    """Have `hearer.before_zero_grad_of(module)` called before each `module.zero_grad()`, of any module, as long as the hearer lives."""
    _hearers.add(hearer)
    original = torch.nn.Module.zero_grad
    if is_replaced(original):
        return

    @functools.wraps(original)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        for each in list(_hearers):
            each.before_zero_grad_of(self)
        original(self, set_to_none)

    replace(torch.nn.Module, "zero_grad", zero_grad)
