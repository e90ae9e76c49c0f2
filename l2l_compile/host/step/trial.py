"""A trial on small tensors: whether steps on one parameter after another leave what a step on all of them leaves.

Two copies of a small optimizer take the same steps. `Together` takes steps as `optimizer.step()` does. `Apart` takes them as
overlapped updates do. Behind each step, all that the two hold is compared: parameters, their state, named entries of the
state, param_groups. Some optimizers mix parameters only behind a warm-up, so counts are also set to large numbers.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from l2l_compile.errors import L2LError
from l2l_compile.host.step.closures import check_needs_no_closure, closure_needed, needs_a_closure
from l2l_compile.host.step.groups import Groups, names_of_differences
from l2l_compile.host.step.sharded_state import check_shards_are_independent
from l2l_compile.host.step.small_copies import (
    Small,
    class_values,
    gradient_for,
    held_attributes,
    in_order,
    like_those_of,
    own_step,
    steps_only_with_a_closure,
    whole_state,
    with_fresh_state,
)
from l2l_compile.host.step.torch_step import hyperparameters, step_on
from l2l_compile.object_copies import copied, same
from l2l_compile.param_groups import parameters_of

_LAYER_BY_LAYER = "an update layer by layer"
_STEPS = 6  # from the beginning
_LATER = (19, 99, 499, 2_519, 9_999, 999_999)  # counts before the later steps; 2,520 is a multiple of all numbers up to ten


def check_layers_are_independent(optimizer: torch.optim.Optimizer) -> None:
    """Raise `L2LError` if an optimizer's step on all parameters differs from steps on one parameter after another.

    Nothing that the optimizer holds is changed. An optimizer that calls the step of another one is refused: that step would be on
    the other optimizer's parameters.
    """
    name = type(optimizer).__name__
    if (inner := _wrapped(optimizer)) is not None:
        within = type(inner).__name__
        raise L2LError(
            f"{name} holds another optimizer ({within}), whose step it calls for all parameters: it cannot update layer by layer. Give the "
            f"option 'optimizer' the {within}, if {name} only hands calls on, or use update='at_step'"
        )
    check_needs_no_closure(optimizer, _LAYER_BY_LAYER)
    with _tried(optimizer):
        reason = _reason(optimizer)
    if reason is not None:
        raise L2LError(f"{name} {reason}, so it cannot update layer by layer: use update='at_step'")
    trained = parameters_of(optimizer)
    check_shards_are_independent(optimizer, functools.partial(_in_shards, optimizer), trained)


def check_steps_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Raise `L2LError` if an optimizer's step on small tensors of the host fails: some libraries have kernels for a GPU alone."""
    if needs_a_closure(optimizer):
        return
    try:
        with nothing_else_changes(optimizer):
            _small_copy_that_steps(optimizer)
    except Exception as error:
        raise L2LError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update parameters on the host, where they stay: "
            f"{_described(error)}. Use an optimizer that can, such as torch.optim.AdamW(fused=True)"
        ) from error


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer that another one holds; None if it holds none."""
    attributes = vars(optimizer).values()
    parts = (v.values() if isinstance(v, dict) else v if isinstance(v, (list, tuple)) else [v] for v in attributes)
    return next((each for each in itertools.chain.from_iterable(parts) if isinstance(each, torch.optim.Optimizer)), None)


@contextmanager
def _tried(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager in which an optimizer steps on small tensors. Raises `L2LError` if a step fails."""
    try:
        with nothing_else_changes(optimizer):
            yield
    except Exception as error:
        with nothing_else_changes(optimizer):
            is_needed = steps_only_with_a_closure(optimizer)  # `step(closure=None)` may refuse None, as those of bSAM and AliG
        if is_needed:
            raise closure_needed(optimizer, _LAYER_BY_LAYER) from error
        raise L2LError(
            f"a step of {type(optimizer).__name__} on small tensors failed, so it cannot update layer by layer: "
            f"{_described(error)}. Use update='at_step', or an optimizer that takes dense gradients of host tensors"
        ) from error


def _described(error: Exception) -> str:
    """The class of an error, and its message if it has one, without the full stop."""
    message = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextmanager
def nothing_else_changes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager for steps on small tensors, in any mode: they have numbers even while a simulated step is made on fake ones.

    Behind it, random numbers and the values that classes hold are as before. Warnings are left to real steps.
    """
    with _disable_current_modes():
        yield from _nothing_left_behind(optimizer)


def _nothing_left_behind(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    of_classes = class_values(optimizer)
    kept = copied(of_classes)
    drawn = _random_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _set_random_state(drawn)
        for (kind, name), value in kept.items():
            if not same(vars(kind).get(name), value):
                setattr(kind, name, value)


def _random_state() -> tuple:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_random_state(state: tuple) -> None:
    of_torch, of_python, of_numpy = state
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _has_drawn_since(state: tuple) -> bool:
    (of_torch, of_python, of_numpy), now = state, _random_state()
    if not torch.equal(of_torch, now[0]) or of_python != now[1]:
        return True
    return of_numpy is not None and (of_numpy[2:] != now[2][2:] or bool((of_numpy[1] != now[2][1]).any()))


def _reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why steps apart are not the step together; None if they are."""
    start = _small_copy_that_steps(optimizer)
    pair = _Pair(start)
    for number in range(_STEPS):
        if (reason := pair.step(number)) is not None:
            return reason
    if same(whole_state(start), whole_state(pair.together)):
        return (
            f"changes neither a parameter of its param_groups nor state in {_STEPS} steps (it may step on other parameters than those of its "
            "param_groups)"
        )
    before, after = pair.together_before, pair.together
    for count in _LATER:
        later = copied(after)
        if not _raise_counts(before, later, count):
            break
        try:
            own_step(_with_gradients(copied(later), _STEPS))()
        except Exception:  # noqa: BLE001  # the count is more than the optimizer takes
            continue
        pair = _Pair(later)
        for number in range(_STEPS, _STEPS + 2):
            if (reason := pair.step(number)) is not None:
                return f"{reason} (from step {count + 1:,} on or before)"
    return None


def _small_copy_that_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A small copy over a few parameters of each kind, or over the first ones in order: an optimizer may step on pairs of them."""
    try:
        return with_fresh_state(optimizer, like_those_of(optimizer))
    except Exception as error:
        with suppress(Exception):
            return with_fresh_state(optimizer, in_order(optimizer))
        raise error


def _with_gradients(small: torch.optim.Optimizer, step: int, without: int | None = None) -> torch.optim.Optimizer:
    for number, parameter in enumerate(parameters_of(small)):
        parameter.grad = gradient_for(parameter, step, number) if number != without else None
    return small


class _Pair:
    """Two copies of a small optimizer. One steps on all parameters together, the other on one after another."""

    def __init__(self, start: torch.optim.Optimizer):
        self.together, self.together_before = copied(start), start
        self._apart = copied(start)
        self._groups = Groups(self._apart)
        self._failure: Exception | None = None

    def step(self, number: int) -> str | None:
        """Take a step with both; the reason if they differ. In one of the first steps, a parameter has no gradient."""
        without = 1 if number == 2 else None
        if number == _STEPS - 1:
            self.together_before = copied(self.together)
        held = copied((held_attributes(self.together), held_attributes(self._apart), class_values(self.together)))
        drawn = _random_state()
        _with_gradients(self.together, number, without)
        own_step(self.together)()
        _without_gradients(self.together)
        if _has_drawn_since(drawn):
            return "draws random numbers in its step, and layers are updated in another order"
        writes_on = self._step_apart(number, without)
        now: tuple[Mapping[Any, Any], ...] = (
            held_attributes(self.together),
            held_attributes(self._apart),
            class_values(self.together),
        )
        for before, after in zip(held, now, strict=True):
            if changed := _changed(before, after, is_first=number == 0):
                return (
                    f"changes its attribute '{changed}' in a step, and layers are stepped by copies of it, which do not share that (keep it in "
                    "param_groups or in the state of each parameter)"
                )
        if writes_on:
            return (
                "changes parameters, or their state, that have no gradient. Behind the steps of the layers its own step runs as well, "
                "and finds no gradients, so it would do that twice"
            )
        reason = self._difference()
        if reason is None and self._failure is not None:
            raise self._failure
        return reason

    def _step_apart(self, number: int, without: int | None) -> bool:
        """Returns whether the optimizer's own step, which finds no gradients, changes parameters or their state.

        Keeps the error of this own step: a difference behind the steps before it says more about the optimizer.
        """
        small, shared = self._apart, hyperparameters(self._apart)
        parameters = list(enumerate(parameters_of(small)))
        for position, parameter in reversed(parameters):
            if position != without:
                gradient = gradient_for(parameter, number, position)
                self._groups.counted(shared, step_on(small, shared, {parameter: gradient}))
        self._groups.commit()
        before = copied(whole_state(small)) if number % _STEPS < 2 else None
        self._groups.begin_own_step()
        try:
            own_step(small)()
        except Exception as error:  # noqa: BLE001  # any class may raise anything
            self._failure = error
        self._groups.end_own_step()
        return before is not None and not same(before, whole_state(small))

    def _difference(self) -> str | None:
        in_groups, named = names_of_differences(hyperparameters(self.together), hyperparameters(self._apart))
        if in_groups:
            return (
                f"keeps {_listed(in_groups)} in param_groups, where a step on all parameters leaves another value than steps on one after "
                "another (a sum over all of them, or a count of calls)"
            )
        if named:
            return (
                f"keeps {_listed(named)} in its state beside that of the parameters, where a step on all parameters leaves another value than "
                "steps on one after another (a sum over all of them, or a count of calls)"
            )
        if not same(whole_state(self.together), whole_state(self._apart)):
            return "does not update parameters independently of each other (a norm over all of them, or a count of its own)"
        return None


def _without_gradients(small: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(small):
        parameter.grad = None


def _changed(before: Mapping[Any, Any], after: Mapping[Any, Any], is_first: bool) -> str | None:
    """The name of an attribute that a step has changed.

    A flag may change, such as one that a warning was given. So may an attribute that the first step sets, such as a cache: whether
    that matters is seen in the numbers.
    """
    for name, value in after.items():
        is_flag = isinstance(value, bool)
        is_set_first = is_first and before.get(name) is None
        if not is_flag and not is_set_first and not same(before.get(name), value):
            return name[1] if isinstance(name, tuple) else name
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _raise_counts(before: torch.optim.Optimizer, after: torch.optim.Optimizer, to: int) -> bool:
    """Set counts, which are numbers that the last step has changed by one, to `to`. Returns whether there is one."""
    found = [_raised_in(earlier, later, to) for earlier, later in zip(before.param_groups, after.param_groups, strict=True)]
    pairs = zip(parameters_of(before), parameters_of(after), strict=True)
    found += [_raised_in(before.state.get(p, {}), after.state.get(q, {}), to) for p, q in pairs]
    found.append(_raised_in(before.state, after.state, to))
    return any(found)


def _raised_in(before: Any, after: Any, to: int) -> bool:
    """Raise the counts in a dict or list, in place, and in those within."""
    found = False
    for name, value in list(after.items() if isinstance(after, dict) else enumerate(after)):
        if isinstance(name, torch.Tensor) or name == "params":
            continue
        try:
            earlier = before[name]
        except (KeyError, IndexError):
            continue
        if isinstance(value, (dict, list)) and type(earlier) is type(value):
            found |= _raised_in(earlier, value, to)
        elif change := _counted_by(earlier, value):
            found = True
            if isinstance(value, torch.Tensor):
                value.fill_(change * to)
            else:
                after[name] = type(value)(change * to)
    return found


def _counted_by(before: Any, after: Any) -> int:
    """1 for a number that counts up, -1 for one that counts down, else 0."""
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if tensors and before.numel() == after.numel() == 1:
        before, after = before.item(), after.item()
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after))
    return int(after - before) if numbers and after - before in (1, -1) else 0


def _in_shards(optimizer: torch.optim.Optimizer, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """A small matrix after three steps, in shards of `sizes` rows (`dim` 0) or columns."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, 6) if dim == 0 else (6, size) for size in sizes]
    chosen = [[Small(shape) for shape in shapes], *([] for _ in optimizer.param_groups[1:])]
    with nothing_else_changes(optimizer):
        small = with_fresh_state(optimizer, chosen)
        parameters = parameters_of(small)
        for parameter, values in zip(parameters, torch.randn(6, 6, generator=generator).split(list(sizes), dim), strict=True):
            parameter.data.copy_(values)
        for _ in range(3):
            gradients = [
                g.contiguous().to(p.dtype)
                for p, g in zip(parameters, torch.randn(6, 6, generator=generator).split(list(sizes), dim), strict=True)
            ]
            step_on(small, hyperparameters(small), dict(zip(parameters, gradients, strict=True)))
    return torch.cat([p.detach() for p in parameters], dim)
