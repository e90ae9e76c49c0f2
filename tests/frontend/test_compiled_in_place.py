"""`module.compile()`, which has no frame of its own around the module."""

from __future__ import annotations

import re

import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from models import Stack

OPTIONS = {"device": "cpu", "block_compiler": "eager"}


def test_a_sequential_in_place_is_compiled_or_refused():
    """Dynamo of PyTorch 2.13 leaves the frame of `nn.Sequential.forward` alone, and nothing would be compiled; that of 2.14 does not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.compile(backend="l2l", options=OPTIONS)
    for _ in range(2):
        try:
            model(torch.ones(2, 4)).sum().backward()
        except L2LError as error:
            assert re.match(r"Sequential.compile\(\) compiles nothing.*Take torch.compile\(model, backend='l2l'\)", str(error))
        else:
            assert l2l_compile.programs(model)


def test_modules_that_hold_a_sequential_are_compiled_in_place():
    model = Stack([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    model.compile(backend="l2l", options=OPTIONS)
    model(torch.ones(2, 5)).sum().backward()
    assert l2l_compile.programs(model)
