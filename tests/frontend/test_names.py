"""Names of modules and inputs, whichever way Dynamo comes to the module."""

from __future__ import annotations

import functools

import torch
from torch import nn

from l2l_compile.report.explain import explain
from models import WIDTH, Stack


def decorated(function):
    @functools.wraps(function)
    def wrapper(*given, **named):
        return function(*given, **named)

    return wrapper


class Decorated(Stack):
    """Its forward is called through a function with `*args` alone, as methods of transformers are."""

    forward = decorated(Stack.forward)


def names(model, *inputs):
    """Names of segments, parameters and inputs as a compiled model has them."""
    import l2l_compile

    compiled = torch.compile(model, backend="l2l", options={"micro_batches": 2, "block_compiler": "eager"})
    compiled(*inputs).sum().backward()
    (program,) = l2l_compile.programs(compiled)
    return [(s.name, s.parameter_names) for s in program.segments], [i.name for i in program.captured.inputs if i.is_weight]


def test_a_decorated_forward_has_the_names_of_a_plain_one():
    x = torch.randn(4, 5)
    assert names(Decorated(3), x) == names(Stack(3), x)


def test_a_function_of_several_modules_keeps_their_numbers():
    @decorated
    def together(*layers):
        x = torch.ones(4, WIDTH)
        for layer in layers:
            x = layer(x)
        return x.sum()

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    report = explain(together)(*layers)
    assert [name for s in report.segments for name in s.parameter_names][:2] == ["0.weight", "0.bias"]


def test_a_function_of_one_module_among_tensors_keeps_its_inputs():
    def apply(*given):
        return given[1](given[0]).sum()

    compiled = torch.compile(apply, backend="l2l", options={"block_compiler": "eager"})
    layer = nn.Linear(WIDTH, WIDTH)
    compiled(torch.ones(4, WIDTH), layer).backward()
    assert layer.weight.grad is not None
