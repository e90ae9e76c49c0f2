"""`module.compile()`, which has no frame of its own around the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules

import l2l_compile
from l2l_compile import L2LError
from models import Stack

OPTIONS = {"device": "cpu", "block_compiler": "eager"}


@pytest.mark.skipif(not trace_rules.check(nn.Sequential.forward), reason="this PyTorch compiles its own modules in place")
def test_a_sequential_that_is_compiled_in_place_is_refused():
    """Dynamo leaves the frame of `nn.Sequential.forward` alone, and nothing would be compiled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.compile(backend="l2l", options=OPTIONS)
    for _ in range(2):
        with pytest.raises(
            L2LError, match=r"Sequential.compile\(\) compiles nothing.*Take torch.compile\(model, backend='l2l'\)"
        ):
            model(torch.ones(2, 4))


@pytest.mark.skipif(trace_rules.check(nn.Sequential.forward), reason="this PyTorch leaves its own modules uncompiled")
def test_a_sequential_is_compiled_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.compile(backend="l2l", options=OPTIONS)
    model(torch.ones(2, 4)).sum().backward()
    assert l2l_compile.programs(model)


def test_modules_that_hold_a_sequential_are_compiled_in_place():
    model = Stack([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    model.compile(backend="l2l", options=OPTIONS)
    model(torch.ones(2, 5)).sum().backward()
    assert l2l_compile.programs(model)
