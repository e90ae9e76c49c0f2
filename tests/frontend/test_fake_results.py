"""Results of fake tensors that are found by their sizes: the same as PyTorch's own, in everything that a fake tensor has."""

import itertools

import pytest
import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from l2l_compile.lowering.sizes import Sizes
from l2l_compile.torch_internals import fake_results
from l2l_compile.torch_internals.fake_results.result_rules import FLOATS, expression

aten = torch.ops.aten
B, T = (sympy.Symbol(name, integer=True, positive=True) for name in "bt")
NUMBERS = {B: 6, T: 7}


class Operands:
    """Fake tensors with two symbolic sizes, `b` and `t`, or with numbers in their place."""

    def __init__(self, dtype, symbols):
        self.sizes, self.dtype = Sizes(NUMBERS, symbols), dtype
        bindings = self.sizes.with_symbols(self.sizes.numbers)
        self.b, self.t = bindings[B], bindings[T]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.sizes.environment)
        self.mode.cache_enabled = False

    def __call__(self, *shape, dtype=None):
        with self.mode:
            return torch.empty(shape, dtype=dtype or self.dtype)


def of_one(o):
    for operator in (
        "gelu", "silu", "relu", "tanh", "sigmoid", "leaky_relu", "elu", "neg", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "abs", "erf",
    ):  # fmt: skip
        yield getattr(aten, operator).default, (o(o.b, o.t, 8),), {}
    for operator in (aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar, aten.sub.Scalar, aten.pow.Tensor_Scalar):
        yield operator, (o(o.b, 8), 2), {}
        yield operator, (o(o.b, 8), 0.5), {}
    yield aten.gelu.default, (o(5, o.b),), {"approximate": "tanh"}
    yield aten.relu.default, (o(),), {}
    for x in (o(o.b, o.t, 8), o(o.b, 5, 24)[:, :, :8], o(o.b, 5, 24)[:, 1:3, 8:]):
        yield aten.relu.default, (x,), {}
        yield aten.mul.Scalar, (x, 3), {}
        yield aten.clone.default, (x,), {}
        yield aten._to_copy.default, (x,), {"dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu")}
    yield aten.clone.default, (o(o.b, o.t, 8).transpose(0, 1),), {"memory_format": torch.contiguous_format}
    yield aten.clone.default, (o(o.b, 8, dtype=torch.int64),), {"memory_format": torch.contiguous_format}
    for dtype in FLOATS:
        yield aten._to_copy.default, (o(o.b, o.t, 8),), {"dtype": dtype}
    for operator in (aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar):
        yield operator, (o(o.b, o.t), 0), {}
        yield operator, (o(o.b, o.t, dtype=torch.int64), -100), {}


def of_gradients(o):
    x = lambda: o(o.b, o.t, 8)  # noqa: E731
    yield aten.gelu_backward.default, (x(), x()), {"approximate": "tanh"}
    for operator in ("gelu", "silu", "tanh", "sigmoid"):
        yield getattr(aten, f"{operator}_backward").default, (x(), x()), {}
    yield aten.threshold_backward.default, (x(), x(), 0), {}
    yield aten.leaky_relu_backward.default, (x(), x(), 0.01, False), {}
    yield aten.elu_backward.default, (x(), 1.0, 1.0, 1.0, False, x()), {}


def of_two(o):
    for operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        for other in (o(o.b, o.t, 8), o(o.t, 8), o(8), o(1, o.t, 8), o(o.b, 1, 1), o(), 0.5, 2):
            yield operator, (o(o.b, o.t, 8), other), {}
        yield operator, (o(8), o(o.b, o.t, 8)), {}
        yield operator, (o(o.b, 5, 24)[:, :, :8], o(o.b, 5, 24)[:, :, 8:16]), {}
        yield operator, (o(o.b, 5, 24)[:, :, :8], o(o.b, 5, 8)), {}
        yield operator, (o(o.b, 5, 24)[:, :, :8], o(5, 24)[:, 1:9]), {}
        yield operator, (o(o.b, o.t), 1 / o.b), {}
    yield aten.add.Tensor, (o(o.b, 8), o(o.b, 8)), {"alpha": 2}
    yield aten.sub.Tensor, (1, o(o.b, 8)), {}
    yield aten.masked_fill.Scalar, (o(o.b, dtype=torch.int64), o(o.b, dtype=torch.bool), -100), {}
    yield aten.masked_fill.Scalar, (o(o.b, o.t, 8), o(o.b, o.t, 8, dtype=torch.bool), 0.0), {}
    yield aten.masked_fill.Scalar, (o(o.b, o.t, 8), o(o.t, 8, dtype=torch.bool), float("-inf")), {}


def of_products(o):
    yield aten.mm.default, (o(o.b, 8), o(8, 3)), {}
    yield aten.mm.default, (o(o.b, 8).t(), o(o.b, 3)), {}
    yield aten.mm.default, (o(o.b, 8), o(3, 8).t()), {}
    yield aten.addmm.default, (o(3), o(o.b * o.t, 8), o(3, 8).t()), {}


def of_norms(o):
    for scales in itertools.product((None, 8), (None, 8)):
        yield aten.native_layer_norm.default, (o(o.b, o.t, 8), [8], *(n and o(n) for n in scales), 1e-5), {}
    yield aten.native_layer_norm.default, (o(o.b, 4, 8), [4, 8], o(4, 8), o(4, 8), 1e-5), {}
    for mask in itertools.product((True, False), repeat=3):
        if any(mask):
            x, mean = (lambda: o(o.b, o.t, 8)), (lambda: o(o.b, o.t, 1))
            yield aten.native_layer_norm_backward.default, (x(), x(), [8], mean(), mean(), o(8), o(8), list(mask)), {}
    for operator in (aten._softmax.default, aten._log_softmax.default):
        for dim in (0, 1, -1):
            yield operator, (o(o.b, o.t, 8), dim, False), {}
    yield aten._safe_softmax.default, (o(o.b, 2, o.t, o.t), -1), {}
    for operator in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        yield operator, (o(o.b, o.t, 8), o(o.b, o.t, 8), -1, o.dtype), {}


def of_losses(o):
    for operator in (aten.sum.dim_IntList, aten.mean.dim):
        for dims, keep in itertools.product(([0], [1, 2], [-1], [0, 1, 2]), (False, True)):
            yield operator, (o(o.b, o.t, 8), dims, keep), {}
            yield operator, (o(o.b, o.t, 8).transpose(0, 2), dims, keep), {}
    labels = lambda *shape: o(*shape, dtype=torch.int64)  # noqa: E731
    for reduction, weight in itertools.product((0, 1, 2), (None, 8)):
        weight = weight and o(weight)
        total, one, two = o(), o(o.b) if reduction == 0 else o(), o(o.b, 3, o.t) if reduction == 0 else o()
        yield aten.nll_loss_forward.default, (o(o.b, 8), labels(o.b), weight, reduction, -100), {}
        yield aten.nll_loss2d_forward.default, (o(o.b, 8, 3, o.t), labels(o.b, 3, o.t), weight, reduction, -100), {}
        yield aten.nll_loss_backward.default, (one, o(o.b, 8), labels(o.b), weight, reduction, -100, total), {}
        yield aten.nll_loss2d_backward.default, (two, o(o.b, 8, 3, o.t), labels(o.b, 3, o.t), weight, reduction, -100, total), {}


def of_parts(o):
    yield aten.cat.default, ([o(o.b, 8), o(o.b, 3)], 1), {}
    yield aten.cat.default, ([o(o.b, 8), o(o.t, 8)],), {}
    yield aten.cat.default, ([o(o.b, 1, 8, dtype=torch.bool), o(o.b, 4, 8, dtype=torch.bool)], -2), {}


def of_views(o):
    x = lambda: o(o.b, o.t, 8)  # noqa: E731
    for operator in (aten.view.default, aten._unsafe_view.default):
        yield operator, (x(), [o.b * o.t, 8]), {}
        yield operator, (o(o.b * o.t, 8), [o.b, o.t, 8]), {}
        yield operator, (x(), [o.b, o.t, 2, 4]), {}
        yield operator, (o(o.b, 8, dtype=torch.int64), [o.b * 8]), {}
        yield operator, (o(1), []), {}
        yield operator, (x().transpose(0, 1), [o.t, o.b, 8]), {}
        yield operator, (x()[1], [o.t * 8]), {}
    yield aten.t.default, (o(o.b, 8),), {}
    yield aten.t.default, (o(o.b),), {}
    yield aten.t.default, (x()[1],), {}
    for dims in ((0, 1), (1, 2), (-1, -2), (1, 1)):
        yield aten.transpose.int, (x(), *dims), {}
    yield aten.transpose.int, (x()[:, 1:, ::2], 0, 2), {}
    yield aten.permute.default, (x(), [2, 0, 1]), {}
    yield aten.permute.default, (x(), [0, -1, -2]), {}
    for dim in (0, 1, 3, -1, -4):
        yield aten.unsqueeze.default, (x(), dim), {}
        yield aten.unsqueeze.default, (x().transpose(0, 2), dim), {}


CASES = [of_one, of_gradients, of_two, of_products, of_norms, of_losses, of_parts, of_views]


def left_to_pytorch(o):
    """Operands of which something has to be decided, or which are others than the rules know."""
    x, y = o(o.b, o.t, 8), o(o.b, o.t, 8)
    yield aten.relu.default, (x.transpose(0, 1),), {}
    yield aten.relu.default, (o(o.b, 1, 8).expand(o.b, 3, 8),), {}
    yield aten.add.Tensor, (x, y.to(torch.float16)), {}
    yield aten.add.Tensor, (o(o.b, 1), o(1, o.t)), {}
    yield aten.mul.Tensor, (o(8), o(o.b, 3, 1)), {}
    yield aten.clone.default, (o(o.b, 3, 4, 5),), {"memory_format": torch.channels_last}
    yield aten.native_layer_norm.default, (x.half(), [8], None, None, 1e-5), {}
    yield aten.exp.default, (o(o.b, dtype=torch.int64),), {}
    yield aten.view.default, (x, [-1, 8]), {}
    yield aten.sum.dim_IntList, (x, []), {}
    yield aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float32}
    yield aten.addmm.default, (o(1), o(o.b, 8), o(8, 3)), {}
    yield aten.addmm.default, (o(o.b, 3), o(o.b, 8), o(8, 3)), {}
    yield aten.masked_fill.Scalar, (o(8), o(o.b, 8, dtype=torch.bool), 0.0), {}


def described(o, result, operands):
    """All that can be asked of a result."""
    if not isinstance(result, FakeTensor):
        return result if result is None else [described(o, r, operands) for r in result]
    numbers = (*result.shape, *result.stride(), result.storage_offset(), result.untyped_storage().nbytes())
    shares = [i for i, x in enumerate(operands) if x.untyped_storage()._cdata == result.untyped_storage()._cdata]
    return (
        [sympy.expand(expression(n)) for n in numbers], result.dtype, result.fake_device, result.requires_grad, result.layout,
        result.is_contiguous(), shares, result.dispatch_keys, result.pytype, result._is_view(),
    )  # fmt: skip


@pytest.mark.parametrize("symbols", [(B, T), (B,), ()], ids=["two symbols", "one symbol", "numbers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cases", CASES, ids=lambda f: f.__name__)
def test_results_are_those_of_pytorch(cases, dtype, symbols):
    o = Operands(dtype, symbols)
    with enable_python_dispatcher():
        for operator, args, kwargs in cases(o):
            operands = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
            known = len(o.sizes.guards().conditions)
            assert fake_results.result_of(o.mode, operator, args, kwargs) is not None, (operator, args)
            fake_results.directly(o.mode)
            with o.mode:
                found = operator(*args, **kwargs)
            assert len(o.sizes.guards().conditions) == known  # nothing is decided
            del o.mode._dispatch_impl
            with o.mode:
                expected = operator(*args, **kwargs)
            assert described(o, found, operands) == described(o, expected, operands), (operator, args)


@pytest.mark.parametrize("symbols", [(B, T), ()], ids=["two symbols", "numbers"])
def test_where_sizes_decide_pytorch_finds_the_result(symbols):
    o = Operands(torch.float32, symbols)
    for operator, args, kwargs in left_to_pytorch(o):
        assert fake_results.result_of(o.mode, operator, args, kwargs) is None, (operator, args)


def test_results_found_directly_reach_decompositions_too():
    o = Operands(torch.float64, (B, T))
    fake_results.directly(o.mode)
    fake_results.directly(o.mode)
    with o.mode:
        x = o(o.b, o.t, 8)
        y = torch.nn.functional.layer_norm(x, (8,))
        assert [expression(n) for n in y.shape] == [expression(n) for n in x.shape]


def test_fake_tensors_of_another_mode_are_left_to_pytorch():
    o, other = Operands(torch.float64, (B, T)), Operands(torch.float64, (B, T))
    assert fake_results.result_of(o.mode, aten.relu.default, (other(4, 5),), {}) is None
