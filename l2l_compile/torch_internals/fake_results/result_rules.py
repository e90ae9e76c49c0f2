"""Building blocks of the rules: the table of rules, conditions on operands, and results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

WIDE = (torch.float32, torch.float64)
FLOATS = (*WIDE, torch.float16, torch.bfloat16)
ANY = (*FLOATS, torch.int64, torch.bool)
RULES: dict[Any, Callable] = {}


class NoRule(Exception):
    """No rule applies, so PyTorch has to find the result."""


def require(condition: bool) -> None:
    """Leave the result to PyTorch unless the condition is true. Raises `NoRule`."""
    if not condition:
        raise NoRule


def rule(*operators: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function for these operations. It maps the mode and the arguments to the result."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


def plain(mode: FakeTensorMode, *tensors: Any, among: Sequence[torch.dtype] = FLOATS) -> None:
    """Require strided fake tensors of this mode, without constants, on one device, each with one of these dtypes."""
    for t in tensors:
        require(type(t) is FakeTensor and t.fake_mode is mode and t.layout is torch.strided and t.constant is None)
        require(t.dtype in among and t.fake_device == tensors[0].fake_device)


def alike(mode: FakeTensorMode, *tensors: Any, among: Sequence[torch.dtype] = FLOATS) -> None:
    """Require the same as `plain`, and one dtype for all."""
    plain(mode, *tensors, among=among)
    require(all(t.dtype is tensors[0].dtype for t in tensors))


def shape_of(t: torch.Tensor) -> tuple:
    """The sizes of a tensor that is contiguous for all values of its symbols (required)."""
    shape = tuple(t.shape)
    require(all(map(is_positive, shape)) and same(t.stride(), strides_of(shape)))
    return shape


def in_order(t: torch.Tensor) -> tuple:
    """The sizes of a tensor with its dimensions in order in memory (required): results of this layout are contiguous."""
    strides = t.stride()
    descend = all(type(stride) is int for stride in strides) and all(a > b > 0 for a, b in itertools.pairwise(strides))
    if descend and all(is_positive(size) and expression(size) != 1 for size in t.shape):
        return tuple(t.shape)
    return shape_of(t)


def strides_of(shape: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor, as expressions."""
    strides: list[Any] = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = product(expression(shape[i]), strides[i])
    return strides


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes are equal for all values of their symbols."""
    return len(one) == len(other) and all(expression(a) == expression(b) for a, b in zip(one, other, strict=True))


def expression(size: Any) -> Any:
    """A size as an int or an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_positive(size: Any) -> bool:
    """Whether a size is positive for all values of its symbols."""
    return size > 0 if type(size) is int else bool(expression(size).is_positive)


def product(a: Any, b: Any) -> Any:
    """The product of two expressions."""
    return a * b if type(a) is int and type(b) is int else _product(a, b)


@functools.lru_cache(maxsize=4096)
def _product(a: Any, b: Any) -> Any:
    return sympy.expand(a * b)


def elements(shape: Sequence[Any]) -> Any:
    """The number of elements, as an expression."""
    return functools.reduce(product, map(expression, shape), 1)


def empty(mode: FakeTensorMode, shape: Sequence[Any], like: Any, dtype: torch.dtype | None = None) -> FakeTensor:
    """A new contiguous tensor on the device of `like`, and with its dtype unless `dtype` is given."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty(tuple(shape), dtype=dtype or like.dtype, device="meta")
    return FakeTensor(mode, made, like.fake_device)


def view(mode: FakeTensorMode, x: FakeTensor, sizes: Sequence[Any], strides: Sequence[Any], offset: Any = 0) -> FakeTensor:
    """A view of a tensor with these sizes and strides; `offset` counts from the first element of the tensor."""
    with in_kernel_invocation_manager(mode):
        made = torch.as_strided(x, tuple(sizes), tuple(strides), x.storage_offset() + offset)
    return FakeTensor(mode, made, x.fake_device)
