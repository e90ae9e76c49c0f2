"""Rules for operations whose results share memory with the operand: views of fake tensors, computed from its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from l2l_compile.torch_internals.fake_results.result_rules import (
    ANY,
    elements,
    is_positive,
    plain,
    require,
    rule,
    same,
    shape_of,
    view,
)

aten = torch.ops.aten


def _permuted(mode: FakeTensorMode, x: FakeTensor, order: Sequence[int]) -> FakeTensor:
    sizes, strides = x.shape, x.stride()
    return view(mode, x, [sizes[i] for i in order], [strides[i] for i in order])


@rule(aten.t.default)
def _of_t(mode: FakeTensorMode, x: FakeTensor) -> FakeTensor:
    plain(mode, x, among=ANY)
    return _permuted(mode, x, range(x.dim())[::-1])


@rule(aten.transpose.int)
def _of_transpose(mode: FakeTensorMode, x: FakeTensor, one: int, other: int) -> FakeTensor:
    plain(mode, x, among=ANY)
    order = list(range(x.dim()))
    require(max(one, other) < len(order) and min(one, other) >= -len(order))
    order[one], order[other] = order[other], order[one]
    return _permuted(mode, x, order)


@rule(aten.permute.default)
def _of_permute(mode: FakeTensorMode, x: FakeTensor, dims: Sequence[int]) -> FakeTensor:
    plain(mode, x, among=ANY)
    order = [dim % x.dim() for dim in dims] if x.dim() else []
    require(sorted(order) == list(range(x.dim())))
    return _permuted(mode, x, order)


@rule(aten.unsqueeze.default)
def _of_unsqueeze(mode: FakeTensorMode, x: FakeTensor, dim: int) -> FakeTensor:
    plain(mode, x, among=ANY)
    require(-x.dim() - 1 <= dim <= x.dim())
    sizes, strides, place = list(x.shape), list(x.stride()), dim % (x.dim() + 1)
    stride = sizes[place] * strides[place] if place < len(sizes) else 1
    sizes.insert(place, 1)
    strides.insert(place, stride)
    return view(mode, x, sizes, strides)


@rule(aten.view.default, aten._unsafe_view.default)
def _of_view(mode: FakeTensorMode, x: FakeTensor, sizes: Sequence[Any]) -> FakeTensor:
    plain(mode, x, among=ANY)
    if same(sizes, x.shape):
        return view(mode, x, x.shape, x.stride())
    shape = shape_of(x)
    require(all(map(is_positive, sizes)) and elements(shape) == elements(sizes))
    return view(mode, x, sizes, _strides(sizes))


def _strides(sizes: Sequence[Any]) -> list[Any]:
    strides: list[Any] = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = sizes[i] * strides[i]
    return strides
