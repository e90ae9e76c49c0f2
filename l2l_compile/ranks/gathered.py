"""Reading a sharded parameter gives a `Gathered`: a copy of the whole parameter, gathered from all ranks, that refuses writes.

With an ordinary tensor, `torch.nn.init.zeros_(module.weight)` would succeed and change nothing: it would write to the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree

from l2l_compile.errors import L2LError

_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = {"__setitem__", "__set__", "__delete__", *(f"__i{name}__" for name in _OPERATORS)}


class Gathered(torch.Tensor):
    """A copy of a whole parameter, or a view of the copy. Its `grad` is that of the sharded parameter: the rows of this rank.

    Operations that write to it raise `L2LError`. A view of it is a `Gathered` too. Any other result is an ordinary tensor.
    """

    _parameter: torch.Tensor
    _name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written is not None:
            raise L2LError(
                f"{written._name} is a copy, gathered from all ranks where it is read, and '{_called(func)}' would be lost with it. Write "
                "to the parameter itself, of which this rank has its rows: that of model.named_parameters(), under torch.no_grad(). Or do "
                "it to the plain model, before l2l_compile.shard"
            )
        if func.__name__ == "__get__" and getattr(func, "__self__", None) is torch.Tensor.grad:
            return args[0]._parameter.grad
        read = [a for a in pytree.tree_leaves((list(args), kwargs)) if isinstance(a, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in ("__deepcopy__", "__reduce_ex__"):  # copies and files have ordinary tensors
                args = [args[0].as_subclass(torch.Tensor), *args[1:]]
            result = func(*args, **kwargs)
            if type(result) in (list, tuple):
                return type(result)(_as_view_of(made, read) for made in result)
            return _as_view_of(result, read)


def whole_of(parameter: DTensor, dims: int) -> torch.Tensor:
    """The whole of a parameter that is sharded along one of `dims` dimensions of a mesh, with the mean of the ranks' gradients.

    Capture recognizes the two calls, and makes a gather of them.
    """
    return parameter.redistribute(placements=[Replicate()] * dims).to_local(grad_placements=[Partial("avg")] * dims)


def gathered(whole: torch.Tensor, parameter: torch.Tensor, name: str) -> Gathered:
    """The gathered tensor `whole` as a `Gathered` of the sharded parameter `parameter`."""
    made = whole.as_subclass(Gathered)
    made._parameter, made._name = parameter, name
    return made


def _as_view_of(made: Any, read: Sequence[Gathered]) -> Any:
    if type(made) is torch.Tensor and made.layout is torch.strided:
        for other in read:
            if made.untyped_storage()._cdata == other.untyped_storage()._cdata:
                return gathered(made, other._parameter, other._name)
    return made


def _written(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Gathered | None:
    """The `Gathered` that an operation would write to; None if it writes to none."""
    name = func.__name__
    targets = [kwargs.get("out")]
    if name in _WRITES or name.endswith("_") and not name.endswith("__") or kwargs.get("inplace"):
        targets += [args[0] if args else None, kwargs.get("tensor"), kwargs.get("input"), kwargs.get("self")]
    return next((t for t in pytree.tree_leaves(targets) if isinstance(t, Gathered)), None)


def _called(func: Callable) -> str:
    """The name of an operation for the error text; for an assignment, the name of the attribute and "="."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{attribute} =" if func.__name__ == "__set__" else func.__name__
