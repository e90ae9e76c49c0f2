"""Weights of a step before, in checkpoints of an optimizer (`delay=1`): entries of `state` that no optimizer knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import local

Earlier = dict[torch.Tensor, list[torch.Tensor]]  # by parameter
_NAME = "l2l_weight_of_a_step_before_"  # followed by the dtype


def add(earlier: Earlier, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Add weights to the result of `optimizer.state_dict()`."""
    states = state_dict["state"]
    for number, parameter in enumerate(parameters_of(optimizer)):
        for tensor in earlier.get(parameter, ()):
            states[number] = {**states.get(number, {}), _NAME + str(tensor.dtype).removeprefix("torch."): tensor}


def take(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> tuple[Earlier, dict[str, Any]]:
    """The weights in a checkpoint that this optimizer is going to load, and the checkpoint without them."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    found: Earlier = {}
    plain = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        own, rest = _apart(plain.get(number, {}))
        if own:
            found[parameter] = own
            plain[number] = rest
            if not rest:
                del plain[number]
    return found, {**state_dict, "state": plain}


def take_loaded(optimizer: torch.optim.Optimizer) -> Earlier:
    """The weights of a checkpoint that an optimizer has loaded already. Removes them from its state."""
    found: Earlier = {}
    for parameter, state in list(optimizer.state.items()):
        own, rest = _apart(state)
        if own:
            found[parameter] = own
            if rest:
                optimizer.state[parameter] = rest
            else:
                del optimizer.state[parameter]
    return found


def _apart(state: Any) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    """The weights in a parameter's state, in their original dtypes, and its other entries. An entry under a name has none."""
    if not isinstance(state, Mapping):
        return [], {}
    own = {name: value for name, value in state.items() if isinstance(name, str) and name.startswith(_NAME)}
    weights = [local(value).to(getattr(torch, name.removeprefix(_NAME)), copy=True) for name, value in own.items()]
    return weights, {name: value for name, value in state.items() if name not in own}
