"""Rewrites of Dynamo's graph that may change no number."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from models import WIDTH, Layer, assert_parity, rows


def twice(x, y):
    y += x
    return y * 2


def seen_through_a_view(x, y):
    row = y[:, 0]
    y += x
    return y * row.unsqueeze(1)


def of_another_dtype(x, y):
    z = y.float()
    z += x
    return z.to(y.dtype)


def broadcast(x, y):
    z = y.sum(1, keepdim=True).expand_as(y).clone()
    z *= x[:, :1]
    return z


def under_vmap(x, y):
    def row(a, b):
        c = a * b
        c += a
        return c

    return torch.func.vmap(row)(x, y)


def into_the_input(x, y):
    z = x
    z -= y
    return z


@pytest.mark.parametrize("combine", [twice, seen_through_a_view, of_another_dtype, broadcast, under_vmap, into_the_input])
def test_writes_into_values(combine):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = combine(x * 1.5, layer(x))
            return x

    assert_parity(Model().double(), rows(6, WIDTH), rows(7, WIDTH))


def test_a_write_that_nobody_sees_splits_no_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, x):
            for layer in self.layers:
                x = twice(x, layer(x))
            return x

    step = assert_parity(Model().double(), rows(6, WIDTH))
    (program,) = l2l_compile.programs(step)
    assert max(block.repeats for block in program.blocks) >= 3 and not program.whole_batch
