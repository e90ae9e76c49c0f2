"""Results of common operations on fake tensors, computed from sizes. An adapter to the private side of fake tensors.

For fake tensors with a symbolic size, PyTorch finds the result of an operation by a decomposition in Python. For a layer norm,
this is twenty operations, which take 8 ms. Here the results of operations that are common in layers are computed directly:

    result_of(mode, aten.addmm.default, (bias, x, weight), {})  ->  an empty tensor of x's rows and weight's columns

This is done only where no decision depends on a symbolic size: operands are contiguous, sizes are equal as expressions, and so
on. Elsewhere the answer is None, and PyTorch finds the result. A rule is a function with `@rule(operators)`. Rules for results
with memory of their own are in `new`; rules for results that share memory with an operand are in `view_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from l2l_compile.torch_internals.fake_results import new, view_rules
from l2l_compile.torch_internals.fake_results.result_rules import RULES, NoRule

__all__ = ["directly", "new", "result_of", "view_rules"]


def result_of(mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation for these operands, fake tensors of `mode`; None where no rule applies."""
    rule = RULES.get(operator)
    if rule is None or mode.propagate_real_tensors:
        return None
    try:
        return rule(mode, *args, **kwargs)
    except NoRule:
        return None


def directly(mode: FakeTensorMode) -> None:
    """From now on, this mode takes the results of its operations from `result_of`, where that is not None."""
    if "_dispatch_impl" in vars(mode):
        return
    original = mode._dispatch_impl

    def dispatch(func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = result_of(mode, func, args, kwargs)
        return made if made is not None else original(func, types, args, kwargs)

    mode._dispatch_impl = dispatch  # type: ignore[method-assign]
