"""An optimizer's own step, on some of its parameters."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.sharded_state import kept_state, mapped, own_state
from l2l_compile.host.step.small_copies import Small, named_state, own_step, with_fresh_state
from l2l_compile.memory.heap import apart_from_the_heap
from l2l_compile.object_copies import copied, is_unchanging, tensors_within
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import attributes, is_sharded, local

_stateless: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # their steps were seen to make no state


@dataclass
class Hyperparameters:
    """All values that parameters share in a step. Steps of layers begin with the same values, and may change copies of them.

    groups   the entries of each param_group except its parameters
    named    the entries of `optimizer.state` that belong to no parameter
    stepped  the numbers of the groups that had parameters in the step that left these values
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    named: dict[Any, Any] = field(default_factory=dict)
    stepped: frozenset[int] = frozenset()

    @functools.cached_property
    def changing(self) -> list[list[str]]:
        """For each group, the names of the values that a step could change in place."""
        return [[name for name, value in group.items() if not is_unchanging(value)] for group in self.groups]

    def joined(self, later: Hyperparameters) -> Hyperparameters:
        """The values after two steps from the same start. A group is that of a step with parameters of it, if there is one."""
        if self.stepped <= later.stepped:
            return later
        groups = [
            after if number in later.stepped or number not in self.stepped else before
            for number, (before, after) in enumerate(zip(self.groups, later.groups, strict=True))
        ]
        return Hyperparameters(groups, later.named, self.stepped | later.stepped)


def hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """What parameters share in a step, as it is now. A tensor that several groups hold has one copy."""
    memo: dict[int, Any] = {}
    groups = [
        {name: copied(value, memo) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    return Hyperparameters(groups, copied(named_state(optimizer), memo))


def shadow_of(
    optimizer: torch.optim.Optimizer, shared: Hyperparameters, parameters: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """An optimizer of the same class over other parameters, a list for each param_group, without their state; and its step.

    Its step runs none of the optimizer's hooks: they are for whole steps. It changes nothing in `shared`.
    """
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.state = defaultdict(dict)
    memo: dict[int, Any] = {}
    shadow.state.update(copied(shared.named, memo))
    shadow.param_groups = [
        {**group, **{name: copied(group[name], memo) for name in changing}, "params": list(own)}
        for group, changing, own in zip(shared.groups, shared.changing, parameters, strict=True)
    ]
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return shadow, own_step(shadow)


def left_by(shadow: torch.optim.Optimizer) -> Hyperparameters:
    """What the step of a shadow has left of the values that parameters share."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in shadow.param_groups]
    stepped = frozenset(number for number, group in enumerate(shadow.param_groups) if group["params"])
    return Hyperparameters(groups, named_state(shadow), stepped)


def step_on(
    optimizer: torch.optim.Optimizer,
    shared: Hyperparameters,
    gradients: Mapping[torch.nn.Parameter, torch.Tensor],
    brought: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> Hyperparameters:
    """Run the class's own `step` on the parameters in `gradients` alone, with the hyperparameters in `shared`.

    The step is on the tensors that `brought` has in the place of parameters and of tensors in their state, of this rank's shards where
    they are sharded. Parameters and their entries in `optimizer.state` change as in the optimizer's own step; `param_groups`, named
    entries of the state, hooks and `p.grad` do not. Returns the hyperparameters after the step: some optimizers count steps there.
    """
    chosen = [[p for p in group["params"] if p in gradients] for group in optimizer.param_groups]
    brought = brought or {}
    left = {id(copy): tensor for tensor, copy in brought.items()}
    stand_ins = {p: _stand_in(p, brought.get(local(p), p), gradients[p]) for own in chosen for p in own}
    shadow, step = shadow_of(optimizer, shared, [[stand_ins[p] for p in own] for own in chosen])
    _keep_names_of(shadow, optimizer, chosen)
    for parameter, stand_in in stand_ins.items():
        if parameter in optimizer.state:
            state = own_state(optimizer.state[parameter], parameter)
            shadow.state[stand_in] = mapped(state, lambda t: brought.get(t, t)) if brought else state
    makes_state = optimizer not in _stateless and any(p not in optimizer.state for p in stand_ins)
    with apart_from_the_heap() if makes_state else nullcontext():
        step()
    if makes_state and not any(s in shadow.state for s in stand_ins.values()):
        _stateless.add(optimizer)
    for parameter, stand_in in stand_ins.items():
        if stand_in in shadow.state:
            before = optimizer.state.get(parameter, {})
            made = mapped(shadow.state[stand_in], lambda t: left.get(id(t), t)) if left else shadow.state[stand_in]
            optimizer.state[parameter] = kept_state(made, parameter, before, lambda: _names_of_entries(optimizer))
        if is_sharded(parameter):
            torch.autograd.graph.increment_version(parameter)  # the step wrote its shard
    after = left_by(shadow)
    for settings, given in zip(after.groups, shared.groups, strict=True):
        if "param_names" in given:
            settings["param_names"] = given["param_names"]
    return after


def _keep_names_of(
    shadow: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, chosen: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Leave the names of the chosen parameters in the groups of an optimizer that was made from `named_parameters()`."""
    for mine, group, own in zip(shadow.param_groups, optimizer.param_groups, chosen, strict=True):
        if "param_names" in mine:
            kept = set(map(id, own))
            names = zip(group["params"], group["param_names"], strict=True)
            mine["param_names"] = [name for parameter, name in names if id(parameter) in kept]


def with_state_of_trial(optimizer: torch.optim.Optimizer, entries: int = 128) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """A small copy of `optimizer` after a step on a square matrix, which is in the first group with a matrix; and the matrix."""
    with_matrix = (n for n, group in enumerate(optimizer.param_groups) if any(p.dim() == 2 for p in group["params"]))
    chosen: list[list[Small]] = [[] for _ in optimizer.param_groups]
    chosen[next(with_matrix, 0)].append(Small((entries, entries)))
    with torch.random.fork_rng([]):
        trial = with_fresh_state(optimizer, chosen)
        (parameter,) = parameters_of(trial)
        step_on(trial, hyperparameters(trial), {parameter: torch.ones_like(parameter)})
    return trial, parameter


def state_bytes_of_trial(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of optimizer state for each entry of a parameter, from a step on a small matrix; None if such a step fails."""
    try:
        trial, parameter = with_state_of_trial(optimizer)
    except Exception:  # noqa: BLE001  # any class may raise anything; a real step will raise it again
        return None
    held = list(tensors_within(trial.state[parameter]))
    return round(sum(t.numel() * t.element_size() for t in held) / parameter.numel())


def _names_of_entries(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the state with one entry for each entry of a parameter, from a step on a small matrix."""
    trial, parameter = with_state_of_trial(optimizer, entries=2)
    return [k for k, v in trial.state[parameter].items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]


def scaled(
    gradients: Mapping[torch.nn.Parameter, torch.Tensor], factor: float, memory: GradientMemory
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gradients in the dtype of their parameters, times a factor. May overwrite the given gradients."""
    wide = {p: memory.widened(g, p.dtype) for p, g in gradients.items()}
    return wide if factor == 1.0 else {p: g.mul_(factor) for p, g in wide.items()}


class TorchStep:
    """Steps of one optimizer on some of its parameters, by its own code."""

    def __init__(self, optimizer: torch.optim.Optimizer, memory: GradientMemory):
        self.optimizer, self._memory = optimizer, memory

    def on(self, shared: Hyperparameters, gradients: Mapping[torch.nn.Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """As `step_on`, with gradients times `factor`; may overwrite them."""
        return step_on(self.optimizer, shared, scaled(gradients, factor, self._memory))


def _stand_in(parameter: torch.nn.Parameter, place: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A parameter of the step: the entries at `place`, the attributes of `parameter`."""
    stand_in = local(place).detach().requires_grad_()
    stand_in.__dict__.update(attributes(parameter))
    stand_in.grad = gradient
    return stand_in
