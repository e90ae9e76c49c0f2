"""Optimizers whose step runs the model again, several times (LBFGS)."""

from __future__ import annotations

import inspect

import torch

from l2l_compile.errors import L2LError


def check_needs_no_closure(optimizer: torch.optim.Optimizer, within: str) -> None:
    """Raise `L2LError` if an optimizer cannot step without a closure. `within` says where it is used."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise L2LError(
            f"{type(optimizer).__name__} needs a closure, with which its step runs forward and backward several times: {within} cannot "
            "follow that. Leave out the options optimizer and update (update='at_step'), and call optimizer.step(closure) in a loop of "
            "your own, or use another optimizer"
        )
