"""The memory that a block's operations hold at once, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.devices.host import HOST
from l2l_compile.lowering.lower import Lowering
from models import compiled

ROWS, WIDTH = 6, 8
VALUE = ROWS * WIDTH  # entries


def workspace(model: nn.Module, backward: bool = False, **options: object) -> int:
    """Bytes that the only block of a model holds at once."""
    step = compiled(model, micro_batches=1, **options)
    step(torch.randn(ROWS, WIDTH)).sum().backward()
    (program,) = l2l_compile.programs(step)
    block, lowering = program.segments[0].block, Lowering(HOST, "eager")
    if backward:
        return lowering.backward(block, program.bindings, (True,)).workspace_bytes
    return lowering.forward(block, program.bindings).workspace_bytes


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(2, -1, WIDTH))


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sin().cos().exp()


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        pytest.param(Linear, {}, 4 * VALUE, id="the result; views of operands take nothing"),
        pytest.param(Functions, {}, 2 * 4 * VALUE, id="an operation's operand and its result"),
        pytest.param(Linear, {"precision": "bf16"}, 2 * VALUE + 4 * VALUE, id="the result in 16 bits and its copy in 32"),
    ],
)
def test_forward_holds(model, options, expected):
    assert workspace(model(), **options) == expected


def test_backward_holds_the_gradients_of_all_operands():
    assert workspace(Linear(), backward=True) == 4 * (WIDTH * WIDTH + WIDTH)
