"""Optimizers whose step runs the model again, several times (LBFGS)."""

from __future__ import annotations

import inspect

import torch

from l2l_compile.errors import L2LError


def needs_a_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without an argument."""
    try:
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind not in variable for p in parameters)


def check_needs_no_closure(optimizer: torch.optim.Optimizer, within: str) -> None:
    """Raise `L2LError` if an optimizer cannot step without a closure. `within` says where it is used."""
    if needs_a_closure(optimizer):
        raise closure_needed(optimizer, within)


def closure_needed(optimizer: torch.optim.Optimizer, within: str) -> L2LError:
    """The error for an optimizer that needs a closure."""
    return L2LError(
        f"{type(optimizer).__name__}.step needs a closure, with which it runs forward and backward several times: {within} cannot "
        "follow that. Leave out the options optimizer and update (update='at_step'), and call optimizer.step(closure) in a loop of "
        "your own, or use another optimizer"
    )
