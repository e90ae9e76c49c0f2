"""Results of common operations on fake tensors, found by their sizes. An adapter to the private side of fake tensors.

PyTorch finds the result of an operation on fake tensors with a symbolic size by running a decomposition of it, written in Python:
twenty operations for a layer norm, which are 8 ms. Here the results of the operations that layers are made of are found directly:

    result_of(mode, aten.addmm.default, (bias, x, weight), {})  ->  an empty tensor of x's rows and weight's columns

Only where nothing has to be decided by a symbolic size: operands are contiguous, sizes are equal as expressions, and so on. Everywhere
else the answer is None, and PyTorch finds the result. A rule is a function with `@rule(operators)`, in `new` for results that have
memory of their own, in `views` for those that share it with an operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from . import new, views
from .rules import RULES, NoRule

__all__ = ["directly", "new", "result_of", "views"]


def result_of(mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives for these operands, the fake tensors of `mode`; None where no rule says so."""
    rule = RULES.get(operator)
    if rule is None or mode.propagate_real_tensors:
        return None
    try:
        return rule(mode, *args, **kwargs)
    except NoRule:
        return None


def directly(mode: FakeTensorMode) -> None:
    """From now on, this mode finds the results of its operations by `result_of`, where that has an answer."""
    if "_dispatch_impl" in vars(mode):
        return
    original = mode._dispatch_impl

    def dispatch(func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = result_of(mode, func, args, kwargs)
        return made if made is not None else original(func, types, args, kwargs)

    mode._dispatch_impl = dispatch  # type: ignore[method-assign]
