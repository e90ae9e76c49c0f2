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

    assert_parity(Model().double(), rows(6, WIDTH), rows(8, WIDTH))


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


@pytest.mark.parametrize(
    "squeeze", [lambda x: x.unsqueeze(1).squeeze(), lambda x: torch.squeeze(x.unsqueeze(-1)), lambda x: x.squeeze()]
)
@pytest.mark.parametrize("micro_batches", [3, 6])
@pytest.mark.slow(but=("3-<lambda>0", "6-<lambda>1"))
def test_a_micro_batch_of_one_row_keeps_its_dimension(squeeze, micro_batches):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = squeeze(layer(x))
            return x

    step = assert_parity(Model().double(), rows(6, WIDTH), rows(7, WIDTH), micro_batches=micro_batches)
    assert not any(p.whole_batch for p in l2l_compile.programs(step))


@pytest.mark.parametrize("parts", [2, 1])
def test_a_parameter_is_written_where_a_mask_says(parts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.marker = nn.Parameter(torch.randn(WIDTH if parts == 2 else ()))

        def forward(self, x, marks):
            x = x * 1.0
            x[marks if parts == 2 else x > 0.5] = self.marker
            for layer in self.layers:
                x = layer(x)
            return x

    step = assert_parity(
        Model().double(), (rows(6, 4, WIDTH), torch.rand(6, 4) > 0.5), (rows(8, 4, WIDTH), torch.rand(8, 4) > 0.5)
    )
    assert not any(p.whole_batch for p in l2l_compile.programs(step))


class Windows(nn.Module):
    """As in Longformer: layers that read windows by strides, of memory that is laid out batch first or time first."""

    def __init__(self, read):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.read = read

    def forward(self, x):
        for layer in self.layers:
            x = x + self.read(layer(x)).tanh()
        return x


def windows(x, count):
    rows, time, width = x.shape
    strides = list(x.stride())
    made = x.as_strided((rows, time // 2 - 1, 4, width), (strides[0], 2 * strides[1], strides[1], strides[2]))
    return made.sum((1, 2)).unsqueeze(1) / torch.div(count, 2, rounding_mode="trunc")


@pytest.mark.parametrize(
    "read",
    [
        lambda x: windows(x, 7),
        lambda x: windows(x.transpose(0, 1).contiguous().transpose(0, 1), 7),
        lambda x: windows(x.transpose(1, 2).contiguous().transpose(1, 2), 7),
        lambda x: windows(x, 7) + x.new_zeros((x.shape[0], torch.div(9, 2, rounding_mode="trunc") * 2, 1)),
    ],
    ids=["rows", "time first", "width first", "sizes in tensors"],
)
def test_views_by_strides(read):
    step = assert_parity(Windows(read).double(), rows(6, 8, WIDTH), rows(5, 8, WIDTH))
    assert not any(p.whole_batch for p in l2l_compile.programs(step))


@pytest.mark.parametrize(
    "read, why",
    [
        (lambda x: x[:, 2:].as_strided((x.shape[0], 4, WIDTH), (8 * WIDTH, WIDTH, 1)).sum(1, keepdim=True), "holds more than"),
        (lambda x: (y := x * 1, y.as_strided((x.shape[0], 4, WIDTH), (8 * WIDTH, WIDTH, 1)).mul_(2), y)[-1], "is written into"),
    ],
    ids=["a slice", "a write"],
)
def test_views_by_strides_that_cannot_be_cut(read, why):
    with pytest.raises(l2l_compile.L2LError, match=why):
        assert_parity(Windows(read).double(), rows(6, 8, WIDTH))
