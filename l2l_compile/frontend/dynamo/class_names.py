"""Methods of the names of PyTorch's classes, which Dynamo does not trace: `type(weight).__module__.startswith("torchao.")`.

Such a name is a constant, and so is the result. PEFT asks in this way for the kind of each weight under DoRA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.variables import ConstantVariable, misc

from l2l_compile.torch_internals.patches import is_replaced, replace


def trace_methods_of_names(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook: frames with a backend that `is_ours` trace methods of strings that are attributes of a class."""
    original = misc.GetAttrVariable.call_method
    if is_replaced(original):
        return

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: Any, args: Any, kwargs: Any) -> Any:
        text = _text_of(self)
        if text is None or not is_ours(innermost_backend(tx.output.compiler_fn)):
            return original(self, tx, name, args, kwargs)
        return ConstantVariable.create(text).call_method(tx, name, args, kwargs)

    replace(misc.GetAttrVariable, "call_method", call_method)


def _text_of(variable: Any) -> str | None:
    """The string that a variable of Dynamo stands for; None if it is not known to be a string."""
    try:
        value = variable.as_python_constant()
    except NotImplementedError:
        return None
    return value if isinstance(value, str) else None
