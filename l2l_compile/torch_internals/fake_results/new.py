"""Rules for operations whose results have memory of their own: new fake tensors, computed from the sizes of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from l2l_compile.torch_internals.fake_results.result_rules import (
    ANY,
    FLOATS,
    WIDE,
    alike,
    empty,
    expression,
    in_order,
    plain,
    require,
    rule,
    same,
    shape_of,
)

aten = torch.ops.aten


# ---- element by element ----------------------------------------------------------------------------------------------


@rule(
    aten.gelu.default, aten.silu.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.leaky_relu.default,
    aten.elu.default, aten.neg.default, aten.exp.default, aten.log.default, aten.sqrt.default, aten.rsqrt.default, aten.sin.default,
    aten.cos.default, aten.abs.default, aten.erf.default, aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar, aten.sub.Scalar,
)  # fmt: skip
def _of_one(mode: FakeTensorMode, x: FakeTensor, *_: Any, **__: Any) -> FakeTensor:
    alike(mode, x)
    return empty(mode, in_order(x), x)


@rule(aten.pow.Tensor_Scalar)
def _of_power(mode: FakeTensorMode, x: FakeTensor, exponent: Any) -> FakeTensor:
    require(type(exponent) in (int, float))
    return _of_one(mode, x)


@rule(aten.clone.default)
def _of_clone(mode: FakeTensorMode, x: FakeTensor, **kwargs: Any) -> FakeTensor:
    plain(mode, x, among=ANY)
    layout = kwargs.get("memory_format")
    require(layout in (None, torch.preserve_format, torch.contiguous_format))
    return empty(mode, tuple(x.shape) if layout is torch.contiguous_format else in_order(x), x)


@rule(aten._to_copy.default)
def _of_copy(mode: FakeTensorMode, x: FakeTensor, **kwargs: Any) -> FakeTensor:
    plain(mode, x)
    others = {name: value for name, value in kwargs.items() if name != "dtype"}
    require(others.items() <= {"layout": torch.strided, "device": x.fake_device}.items() and kwargs.get("dtype") in FLOATS)
    return empty(mode, in_order(x), x, kwargs["dtype"])


@rule(
    aten.gelu_backward.default, aten.silu_backward.default, aten.threshold_backward.default, aten.tanh_backward.default,
    aten.sigmoid_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
)  # fmt: skip
def _of_gradient(mode: FakeTensorMode, gradient: FakeTensor, *args: Any, **_: Any) -> FakeTensor:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    require(len(tensors) == 1)
    alike(mode, gradient, *tensors)
    shape = shape_of(tensors[0])
    require(same(shape_of(gradient), shape))
    return empty(mode, shape, gradient)


@rule(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
def _of_two(mode: FakeTensorMode, one: Any, other: Any, **_: Any) -> FakeTensor:
    if not isinstance(other, torch.Tensor):
        return _of_one(mode, one)
    if not isinstance(one, torch.Tensor):
        return _of_one(mode, other)
    alike(mode, one, other)
    return empty(mode, _shape_of_larger(one, other), one)


@rule(aten.masked_fill.Scalar)
def _of_masked_fill(mode: FakeTensorMode, x: FakeTensor, mask: FakeTensor, value: Any) -> FakeTensor:
    plain(mode, x, among=(*FLOATS, torch.int64))
    require(x.dim() > 0 and (type(value) is int or type(value) is float and x.dtype is not torch.int64))
    plain(mode, mask, among=(torch.bool,))
    require(x.fake_device == mask.fake_device and x.dim() >= mask.dim())
    return empty(mode, _shape_of_larger(x, mask), x)


@rule(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar)
def _of_comparison(mode: FakeTensorMode, x: FakeTensor, value: Any) -> FakeTensor:
    require(type(value) in (int, float))
    alike(mode, x, among=(*FLOATS, torch.int64))
    return empty(mode, in_order(x), x, torch.bool)


def _shape_of_larger(one: torch.Tensor, other: torch.Tensor) -> tuple:
    """The result's sizes for two operands of which only the smaller one is broadcast, which is required."""
    large, small = (one, other) if one.dim() >= other.dim() else (other, one)
    shape, sizes = in_order(large), in_order(small)
    for size, there in zip(reversed(shape), reversed(sizes), strict=False):
        require(expression(there) == 1 or expression(there) == expression(size))
    return shape


# ---- products and normalisation --------------------------------------------------------------------------------------


@rule(aten.mm.default)
def _of_mm(mode: FakeTensorMode, one: FakeTensor, other: FakeTensor) -> FakeTensor:
    alike(mode, one, other)
    require(one.dim() == other.dim() == 2 and expression(one.shape[1]) == expression(other.shape[0]))
    return empty(mode, (one.shape[0], other.shape[1]), one)


@rule(aten.addmm.default)
def _of_addmm(mode: FakeTensorMode, bias: FakeTensor, one: FakeTensor, other: FakeTensor, **factors: Any) -> FakeTensor:
    alike(mode, bias, one, other)
    require(not factors and bias.dim() == 1 and other.dim() == 2 and type(other.shape[1]) is int)
    require(bias.shape[0] == other.shape[1] > 0)
    return _of_mm(mode, one, other)


@rule(aten.native_layer_norm.default)
def _of_layer_norm(
    mode: FakeTensorMode, x: FakeTensor, sizes: Sequence[Any], weight: FakeTensor | None, bias: FakeTensor | None, _: float
) -> tuple[FakeTensor, ...]:
    scales = [t for t in (weight, bias) if t is not None]
    alike(mode, x, *scales, among=WIDE)
    shape, kept = shape_of(x), x.dim() - len(sizes)
    require(0 < kept < len(shape) and all(same(normalized, sizes) for normalized in (shape[kept:], *map(shape_of, scales))))
    statistics = (*shape[:kept], *(1 for _ in sizes))
    return empty(mode, shape, x), empty(mode, statistics, x), empty(mode, statistics, x)


@rule(aten.native_layer_norm_backward.default)
def _of_layer_norm_backward(
    mode: FakeTensorMode,
    gradient: FakeTensor,
    x: FakeTensor,
    sizes: Sequence[Any],
    mean: FakeTensor,
    deviation: FakeTensor,
    weight: FakeTensor | None,
    bias: FakeTensor | None,
    mask: Sequence[bool],
) -> tuple[FakeTensor | None, ...]:
    alike(mode, gradient, x, mean, deviation, weight, bias, among=WIDE)
    shape, kept = shape_of(x), x.dim() - len(sizes)
    require(0 < kept < len(shape) and same(shape_of(gradient), shape) and same(shape[kept:], sizes))
    made = shape, sizes, sizes
    return tuple(empty(mode, there, x) if wanted else None for there, wanted in zip(made, mask, strict=True))


@rule(aten._softmax.default, aten._log_softmax.default)
def _of_softmax(mode: FakeTensorMode, x: FakeTensor, _: int, half_to_float: bool) -> FakeTensor:
    alike(mode, x, among=WIDE)
    require(not half_to_float and x.dim() > 0)
    return empty(mode, shape_of(x), x)


@rule(aten._safe_softmax.default)
def _of_safe_softmax(mode: FakeTensorMode, x: FakeTensor, _: int, dtype: torch.dtype | None = None) -> FakeTensor:
    require(dtype in (None, x.dtype))
    return _of_softmax(mode, x, 0, False)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _of_softmax_backward(
    mode: FakeTensorMode, gradient: FakeTensor, output: FakeTensor, _: int, dtype: torch.dtype
) -> FakeTensor:
    alike(mode, gradient, output, among=WIDE)
    require(dtype is gradient.dtype and output.dim() > 0)
    return _of_gradient(mode, gradient, output)


# ---- reductions and losses -------------------------------------------------------------------------------------------


@rule(aten.sum.dim_IntList, aten.mean.dim)
def _of_reduction(
    mode: FakeTensorMode, x: FakeTensor, dims: Sequence[int] | None, keep: bool = False, **kwargs: Any
) -> FakeTensor:
    alike(mode, x)
    require(not kwargs and bool(dims) and all(-x.dim() <= dim < x.dim() for dim in dims or ()))
    reduced = {dim % x.dim() for dim in dims or ()}
    shape = [1 if i in reduced else size for i, size in enumerate(x.shape) if keep or i not in reduced]
    return empty(mode, shape, x)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _of_nll_loss(
    mode: FakeTensorMode, scores: FakeTensor, target: FakeTensor, weight: FakeTensor | None, reduction: int, _: int
) -> tuple[FakeTensor, FakeTensor]:
    _check_labels(mode, scores, target, weight)
    return empty(mode, () if reduction else shape_of(target), scores), empty(mode, (), scores)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _of_nll_loss_backward(
    mode: FakeTensorMode,
    gradient: FakeTensor,
    scores: FakeTensor,
    target: FakeTensor,
    weight: FakeTensor | None,
    reduction: int,
    _: int,
    total: FakeTensor,
) -> FakeTensor:
    alike(mode, gradient, scores, total, among=WIDE)
    _check_labels(mode, scores, target, weight)
    require(same(shape_of(gradient), () if reduction else shape_of(target)))
    return empty(mode, shape_of(scores), scores)


def _check_labels(mode: FakeTensorMode, scores: FakeTensor, target: FakeTensor, weight: FakeTensor | None) -> None:
    alike(mode, scores, *(() if weight is None else (weight,)), among=WIDE)
    plain(mode, target, among=(torch.int64,))
    shape = shape_of(scores)
    require(scores.fake_device == target.fake_device and len(shape) in (2, 4) and type(shape[1]) is int)
    require(same(shape_of(target), (shape[0], *shape[2:])) and (weight is None or same(shape_of(weight), shape[1:2])))


# ---- parts -----------------------------------------------------------------------------------------------------------


@rule(aten.cat.default)
def _of_cat(mode: FakeTensorMode, tensors: Sequence[FakeTensor], dim: int = 0) -> FakeTensor:
    require(len(tensors) > 0)
    alike(mode, *tensors, among=ANY)
    shapes = list(map(shape_of, tensors))
    count = len(shapes[0])
    require(-count <= dim < count)
    place = dim % count
    apart = [(*shape[:place], *shape[place + 1 :]) for shape in shapes]
    require(all(same(one, apart[0]) for one in apart))
    return empty(mode, (*shapes[0][:place], sum(shape[place] for shape in shapes), *shapes[0][place + 1 :]), tensors[0])
