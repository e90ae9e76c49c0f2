"""Whether gradients of a segment depend on what its operands contain: operation by operation, and against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.streaming.linear import made_of, nonlinear_operation


def block_of(function, *differentiable) -> Block:
    class Traced(nn.Module):
        def forward(self, x, y):
            return function(x, y)

    module = fx.symbolic_trace(Traced())
    specs = tuple(TensorSpec((4,), torch.float64, each) for each in differentiable)
    return Block("block", module, {}, None, (), specs, specs[:1])


LINEAR = {
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean() * 3,
    "negative": lambda x, y: -x,
    "quotient": lambda x, y: x.sum() / y.sum(),
    "product": lambda x, y: x * y.exp(),
    "difference": lambda x, y: y - x.view(2, 2).flatten(),
    "terms": lambda x, y: F.nll_loss(-x.unsqueeze(-1), (y * 0).long()),
}
OTHERS = {
    "square": lambda x, y: x * x,
    "power": lambda x, y: x.pow(2).sum(),
    "root": lambda x, y: x.sum().sqrt(),
    "divisor": lambda x, y: y / x,
    "greatest": lambda x, y: x.max(),
    "logarithm": lambda x, y: torch.logsumexp(x, 0),
}


def gradients(function, x, y):
    operands = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    return torch.autograd.grad(function(*operands).sum(), operands, allow_unused=True)


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_gradients_of_an_operand_do_not_depend_on_it_if_linear(name):
    function = LINEAR.get(name) or OTHERS[name]
    y = torch.rand(4, dtype=torch.float64) + 1
    first, second = (gradients(function, torch.rand(4, dtype=torch.float64) + 1 + i, y)[0] for i in range(2))
    is_linear = nonlinear_operation(block_of(function, True, False), {0}) is None
    assert is_linear == (name in LINEAR) == torch.equal(first, second)


@pytest.mark.parametrize("name", ["product", "quotient"])
def test_a_factor_with_a_gradient_depends_on_the_other(name):
    function = LINEAR[name]
    y = torch.rand(4, dtype=torch.float64) + 1
    first, second = (gradients(function, torch.rand(4, dtype=torch.float64) + 1 + i, y)[1] for i in range(2))
    assert not torch.equal(first, second)
    assert nonlinear_operation(block_of(function, True, True), {0}) is not None


def test_an_output_is_made_of_the_operands_that_it_reads():
    assert made_of(block_of(lambda x, y: (x.sum(), y + 1), False, False), 1) == {1}
    assert made_of(block_of(lambda x, y: (x.sum(), torch.bernoulli(y)), False, False), 1) is None
    assert made_of(block_of(lambda x, y: (x.sum(), F.dropout(y)), False, False), 1) is None
