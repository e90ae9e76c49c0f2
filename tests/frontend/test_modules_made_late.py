"""A model that makes a layer in its forward, as BigBird does for short texts: Dynamo compiles the layer's `__init__` by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import pair_of, rows


class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by * x


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(5, 5), None

    def forward(self, x):
        if self.scale is None:
            for _ in range(1):
                torch._dynamo.graph_break()
                self.scale = Scale(2.0)
        return self.scale(self.first(x))


@pytest.mark.filterwarnings("ignore:backend 'l2l' does not run")
def test_numbers_are_eagers():
    pair = pair_of(Late().double())
    for _ in range(2):
        pair.step(rows(6)).check()
