"""Refuses models that draw random numbers: eager draws different numbers, so the results cannot be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from l2l_compile.errors import L2LError
from l2l_compile.testing.leaves import leaves_of, own_copy


class Watched:
    """A model in eager. A call raises `L2LError` if its results depend on random numbers that it draws."""

    def __init__(self, model: Callable):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        given = own_copy((args, kwargs))
        result = self.model(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            _refuse_draws(self.model, *given)
        return result


def _refuse_draws(model: Callable, args: tuple, kwargs: dict) -> None:
    if _same_for_all_seeds(model, args, kwargs):  # drawn in vain: a layer that may be skipped, and never is
        return
    drawing = _drawing(model, args, kwargs)
    names = ", ".join(drawing[:4]) + (f" and {len(drawing) - 4} more" if len(drawing) > 4 else "")
    raise L2LError(
        f"the model draws random numbers, in {names}. A streamed model draws other ones than eager for the same seed, so their "
        "results cannot be compared. Compare it with a probability of 0 (torch.nn.Dropout(p=0), dropout entries of a config), or in evaluation "
        "(model.eval()), which has gradients as well"
    )


@torch.no_grad()
def _same_for_all_seeds(model: Callable, args: tuple, kwargs: dict) -> bool:
    found = []
    with torch.random.fork_rng([]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            copied_args, copied_kwargs = own_copy((args, kwargs))
            found.append(leaves_of(copy.deepcopy(model)(*copied_args, **copied_kwargs)))
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*map(dict.values, found), strict=True)
    )


@torch.no_grad()
def _drawing(model: Callable, args: tuple, kwargs: dict) -> list[str]:
    """The innermost modules that draw, by name and class."""
    if not isinstance(model, nn.Module):
        return [getattr(model, "__name__", type(model).__name__)]
    copied, found, before = copy.deepcopy(model), list[str](), dict[nn.Module, tuple]()
    names = {module: name for name, module in copied.named_modules()}

    def entered(module: nn.Module, _: Any) -> None:
        before[module] = (torch.get_rng_state(), len(found))

    def left(module: nn.Module, *_: Any) -> None:
        state, count = before[module]
        if len(found) == count and not torch.equal(state, torch.get_rng_state()):
            found.append(f"'{names[module]}' ({type(module).__name__})" if names[module] else type(module).__name__)

    for module in names:
        module.register_forward_pre_hook(entered)
        module.register_forward_hook(left)
    with torch.random.fork_rng([]):
        copied(*args, **kwargs)
    return list(dict.fromkeys(found))
