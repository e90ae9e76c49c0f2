"""Layers share a block only if they compute the same function of their operands.

The pairs below are what PyTorch's own `use_graph_deduplication` merges, or might be taken for equal by their weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from l2l_compile.passes.pipeline import SEGMENTATION
from models import Layer, Stack, assert_parity, compilation, rows


def frozen_norm() -> Layer:
    layer = Layer()
    layer.norm.weight.requires_grad_(False)
    return layer


class Clamped(Layer):
    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, x):
        return super().forward(x).clamp(min=self.least)


class Rolled(Layer):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return super().forward(x).roll(self.by, -1)


class Rooted(Layer):
    """A buffer in the place of a parameter."""

    def __init__(self):
        super().__init__()
        weight = self.norm.weight.detach()
        del self.norm.weight
        self.norm.register_buffer("weight", weight)


DIFFERENT = {
    "eps": (lambda: Layer(eps=1e-5), lambda: Layer(eps=1e-2)),
    "float constant": (lambda: Layer(scale=0.5), lambda: Layer(scale=0.25)),
    "int and float constant": (lambda: Layer(scale=2), lambda: Layer(scale=2.0)),
    "activation": (lambda: Layer(activation=F.gelu), lambda: Layer(activation=F.silu)),
    "keyword of an activation": (
        lambda: Layer(activation=F.gelu),
        lambda: Layer(activation=nn.GELU(approximate="tanh")),
    ),
    "shape": (lambda: Layer(hidden=16), lambda: Layer(hidden=24)),
    "frozen parameter": (Layer, frozen_norm),
    "operand order": (lambda: Layer(flip=False), lambda: Layer(flip=True)),
    "sign of zero": (lambda: Clamped(0.0), lambda: Clamped(-0.0)),
    "shift": (lambda: Rolled(1), lambda: Rolled(2)),
    "buffer for a parameter": (Layer, Rooted),
    "dropout": (lambda: Layer(dropout=0.0), lambda: Layer(dropout=0.5)),
}


def blocks_of_layers(model: Stack) -> list[set]:
    found = compilation(model, rows(6), passes=SEGMENTATION[:2])
    return [
        {s.block for s in found.segments if s.name == f"layers.{i}" or s.name.startswith((f"layers.{i}.", f"layers.{i}#"))}
        for i in range(len(model.layers))
    ]


@pytest.mark.parametrize("what", DIFFERENT)
def test_equal_layers_are_merged_and_layers_that_differ_are_not(what):
    one, other = DIFFERENT[what]
    a, b, c, d = blocks_of_layers(Stack([one(), one(), other(), other()]).double())
    assert a and a == b
    assert c and c == d
    assert not a & c


def test_layers_that_differ_in_several_ways_keep_parity():
    kinds = [pair[1]() for name, pair in DIFFERENT.items() if name not in ("shape", "dropout")]
    assert_parity(Stack([*kinds, Layer(), Layer()]).double(), rows(6))


def test_layers_that_differ_only_in_a_constant_keep_parity():
    class Offset(Layer):
        def __init__(self, by):
            super().__init__()
            self.by = torch.full((8,), float(by), dtype=torch.float64)  # neither parameter nor buffer

        def forward(self, x):
            return super().forward(x) + self.by

    assert_parity(Stack([Offset(i) for i in range(4)]).double(), rows(6))


def test_layer_that_repeats_only_in_part_is_one_segment():
    """The layers 1, 2 and 3 have all but one parameter in common."""
    found = compilation(Stack([Layer(), Layer(), Rooted(), Rooted()]).double(), rows(6), passes=SEGMENTATION[:2])
    assert [s.name for s in found.segments[1:-1]] == [f"layers.{i}" for i in range(4)]
