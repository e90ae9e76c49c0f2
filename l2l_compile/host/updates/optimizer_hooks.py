"""What PyTorch calls on the user's optimizer and modules, and what each call means for overlapped updates.

| call of the loop                     | here                     | answered by                                  |
|--------------------------------------|--------------------------|----------------------------------------------|
| `optimizer.step()`                   | `before_own_step`        | `begin_own_step`, `end_own_step`             |
| `step()` of another optimizer        | `before_step_of`, ...    | an error if the gradients went to this one   |
| `GradScaler.step(optimizer)`         | `before_scaled_step_of`  | an error within a step                       |
| `zero_grad()` of optimizer or module | `before_zero_grad`, ...  | `zero`, `zero_outside_of_a_step`             |
| `state_dict()`, `add_param_group()`  | `before_reading`         | `wait_for_reading`                           |
| `optimizer.load_state_dict()`        | `before_loading`         | `load`                                       |
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from l2l_compile.errors import L2LError, ReentryError
from l2l_compile.host.hooks import StepHook, WeakHook, before, remove_with, subscribe, wrap_user_hooks
from l2l_compile.host.updates.gradient_ledger import GradientLedger, Parameter
from l2l_compile.param_groups import parameters_of
from l2l_compile.reentry import check, whole
from l2l_compile.torch_internals.autograd import backward_is_running


class HookedUpdates(Protocol):
    """The updates that answer. All methods run on the user's thread."""

    optimizer: torch.optim.Optimizer

    @property
    def managed(self) -> set[Parameter]:
        """The parameters that are updated here."""

    def has_begun_to_update(self) -> bool:
        """Whether the step that has begun may have updated parameters."""

    def wait_for_reading(self) -> None:
        """Code of the user is about to read or replace parameters or state."""

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer loads a checkpoint. Returns what PyTorch is to load."""

    def zero(self, set_to_none: bool) -> None:
        """All gradients are dropped: a step that has begun starts again."""

    def zero_outside_of_a_step(self, parameters: Iterable[Parameter], set_to_none: bool) -> None:
        """The gradients of some parameters are dropped while no step has begun."""

    def begin_own_step(self) -> None:
        """`optimizer.step()` is called, which ends a step. Its own code then finds no gradients of the compiled model."""

    def end_own_step(self) -> None:
        """`optimizer.step()` is about to return."""

    def begin_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """`step()` of any optimizer is called, this one or another."""


def _while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give the method the updates that it is called for. Nothing happens if another thread has just dropped the model."""

    @functools.wraps(method)
    def called(self: OptimizerHooks, *arguments: Any, **named: Any) -> Any:
        updates = self.updates()
        return method(self, updates, *arguments, **named) if updates is not None else None

    return called


class OptimizerHooks:
    """Hooks for one `HookedUpdates`, which owns this object. Neither is kept alive by the hooks."""

    def __init__(self, updates: HookedUpdates, ledger: GradientLedger):
        self.updates, self._ledger = weakref.ref(updates), ledger
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        optimizer = updates.optimizer
        before_step = optimizer.register_step_pre_hook(StepHook(self.before_own_step))
        after_step = optimizer.register_step_post_hook(StepHook(self.after_own_step))
        self._step_hooks = before_step.id, after_step.id
        handles = [
            before_step,
            after_step,
            optimizer.register_state_dict_pre_hook(WeakHook(self.before_reading)),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self.before_loading)),
        ]
        for handle in handles:
            remove_with(updates, handle.remove)
        remove_with(updates, before(optimizer, "zero_grad", self.before_zero_grad))
        remove_with(updates, before(optimizer, "add_param_group", self.before_reading))
        subscribe(self)

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Make `state_dict` of these modules, and of their submodules, wait for updates that are under way."""
        for module in (inner for root in modules for inner in root.modules()):
            if module not in self._modules:
                self._modules.add(module)
                module.register_state_dict_pre_hook(WeakHook(self.before_reading))
                module.register_load_state_dict_pre_hook(WeakHook(self.before_reading))

    @_while_alive
    def wrap_user_hooks(self, updates: HookedUpdates) -> None:
        """Run hooks that the user has added to `step` outside of these."""
        wrap_user_hooks(updates.optimizer, *self._step_hooks)

    @_while_alive
    @whole("state_dict(), load_state_dict() or add_param_group()")
    def before_reading(self, updates: HookedUpdates, *_: Any, **__: Any) -> None:
        """Code of the user is about to read or replace parameters or state. Raises `ReentryError`."""
        check()
        if updates.has_begun_to_update() and backward_is_running():
            raise ReentryError(
                f"state_dict() within a backward, and update={self._ledger.update!r} has updated some layers and not the others: it would save "
                "half of a step. A signal handler sets a flag alone, and the loop saves behind optimizer.step(): docs/saving.md has an example"
            )
        updates.wait_for_reading()

    @_while_alive
    @whole("load_state_dict()")
    def before_loading(
        self, updates: HookedUpdates, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """The optimizer loads a checkpoint. Raises `ReentryError`."""
        check()
        return updates.load(optimizer, state_dict)

    @_while_alive
    @whole("optimizer.zero_grad()")
    def before_zero_grad(self, updates: HookedUpdates, set_to_none: bool = True, *_: Any, **__: Any) -> None:
        """`optimizer.zero_grad()`: a step that has begun starts again. Raises `L2LError` if it has made updates."""
        check()
        updates.zero(set_to_none)

    @_while_alive
    @whole("zero_grad()")
    def before_zero_grad_of(self, updates: HookedUpdates, module: torch.nn.Module, set_to_none: bool) -> None:
        """As `before_zero_grad`, for a module. Raises `L2LError` within a step if it has only some of the parameters."""
        if not self._ledger.has_begun:
            updates.zero_outside_of_a_step(module.parameters(), set_to_none)
            return
        managed = updates.managed
        theirs = managed.intersection(module.parameters())
        if theirs and theirs != managed:
            raise L2LError(
                f"zero_grad() of a module with {len(theirs)} of the optimizer's {len(managed)} parameters, after a backward of this "
                f"step: update={self._ledger.update!r} drops the gradients of all of them, or none. Call optimizer.zero_grad()"
            )
        if theirs:
            check()
            updates.zero(set_to_none)

    @_while_alive
    @whole("optimizer.step()")
    def before_own_step(self, updates: HookedUpdates, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """`optimizer.step()` is called. Raises `L2LError` for a closure."""
        check()
        if any(a is not None for a in (*arguments[1:], *named.values())):
            raise L2LError(
                f"optimizer.step(closure) runs the model again within the step, which update={self._ledger.update!r} cannot "
                "follow: leave out the options optimizer and update"
            )
        updates.begin_own_step()

    @_while_alive
    @whole("optimizer.step()")
    def after_own_step(self, updates: HookedUpdates, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """`optimizer.step()` is about to return."""
        updates.end_own_step()

    @_while_alive
    def before_step_of(self, updates: HookedUpdates, optimizer: torch.optim.Optimizer) -> None:
        """A step may look at gradients. Where they are missing, `after_step_of` raises."""
        updates.begin_step_of(optimizer)

    @_while_alive
    def after_step_of(self, updates: HookedUpdates, optimizer: torch.optim.Optimizer) -> None:
        """Raises `L2LError` if another optimizer with the same parameters was stepped at the end of a step."""
        if optimizer is updates.optimizer or not self._ledger.complete:
            return
        if shared := updates.managed.intersection(parameters_of(optimizer)):
            raise L2LError(
                f"{type(optimizer).__name__}.step() found no gradients of {len(shared)} parameters: the option optimizer is another "
                f"{type(updates.optimizer).__name__}, and update={self._ledger.update!r} gives them to that one. Compile the model again with "
                f"the optimizer that is stepped, or call step() of the one that it was compiled with{self._ledger.never_stepped}"
            )

    @_while_alive
    def before_scaled_step_of(self, updates: HookedUpdates, optimizer: torch.optim.Optimizer) -> None:
        """Raises `L2LError` within a step: gradients that are collected here would keep the scale of a `GradScaler`."""
        if optimizer is updates.optimizer and self._ledger.has_begun:
            raise L2LError(
                f"torch.amp.GradScaler around update={self._ledger.update!r}, whose gradients never come to p.grad, where they are unscaled: "
                "leave it out (precision='fp16' scales the loss by itself), or use update='at_step'"
            )
