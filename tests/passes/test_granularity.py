"""The guard: what holds more than a layer is named with the reason, and the report says what grows with depth."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from capabilities import has_lstm_in_bf16
from l2l_compile import Options
from l2l_compile.estimate.device_memory import device_memory
from models import backward_of_loss, pair_of, rows
from structures import MODELS, WIDTH, Layer, Siamese, Tower

OPTIONS = {"micro_batches": 3, "block_compiler": "eager"}


class Transformed(nn.Module):
    """The whole tower inside of a transform of torch.func: no cut may be within."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, a, b):
        def tower(x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

        return F.mse_loss(torch.vmap(tower)(a), b)


class Dense(nn.Module):
    """Every layer reads what all before it have made."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(depth))

    def forward(self, a, b):
        made = [a]
        for layer in self.layers:
            made.append(torch.tanh(layer(torch.cat(made, -1))))
        return F.mse_loss(made[-1], b)


def both():
    torch.manual_seed(1)
    return [rows(6, 5, WIDTH) for _ in range(2)]


def trained(model, **options):
    """The model compiled, after a step with eager's gradients; and what it warned of."""
    pair = pair_of(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pair.run(backward_of_loss, *both()).check()
    return pair.compiled, [str(w.message) for w in caught if "backend 'l2l'" in str(w.message)]


def peak(step) -> int:
    return l2l_compile.stats(step).peak_device_bytes


def test_layers_that_may_not_be_cut_are_named_and_memory_grows():
    report = l2l_compile.explain(Transformed(8).double(), OPTIONS)(*both())
    (uncut,) = report.uncut
    assert uncut.layers == pytest.approx(8) and "torch.func" in uncut.why
    assert str(uncut) in " ".join(str(report).split())
    (shallow, said), (deep, _) = (trained(Transformed(depth).double()) for depth in (8, 16))
    assert peak(deep) > 1.5 * peak(shallow)
    assert len(said) == 1 and "holds 8 layers" in said[0] and "Remedy" in said[0]


def test_values_that_all_layers_read_are_named_and_memory_grows():
    report = l2l_compile.explain(Dense(8).double(), OPTIONS)(*both())
    assert not report.uncut
    assert any("later layers read all of them" in line for line in report.device_memory.grows)
    (shallow, said), (deep, _) = (trained(Dense(depth).double()) for depth in (8, 16))
    assert peak(deep) > 1.5 * peak(shallow) and not said


@pytest.mark.parametrize("stash", ["host", "device"])
def test_only_stashes_on_the_device_grow_with_depth(stash):
    report = l2l_compile.explain(Siamese(6).double(), {**OPTIONS, "stash": stash})(*both())
    grows = report.device_memory.grows
    if stash == "host":
        assert not grows and "of it grows with depth: 0 B" in str(report)
    else:
        (line,) = grows
        assert "stashes" in line and "'host' sends them to the host" in line


@pytest.mark.parametrize(
    "options", [{}, {"stash": "device"}, {"prefetch": 0}, {"prefetch": 3}, {"micro_batches": 1}, {"outputs": "loss"}]
)
@pytest.mark.parametrize("name", ["Siamese", "Skips", "StackedPairs"])
def test_expected_peak_is_the_one_that_is_measured(name, options):
    step, _ = trained(MODELS[name](5).double(), **options)
    expected = device_memory(l2l_compile.programs(step), Options.build({**OPTIONS, "device": "cpu", **options}))
    assert expected.peak == pytest.approx(peak(step), rel=0.01)


class Recurrent(nn.Module):
    """A language model whose scores go to the user, and whose gradients come from there."""

    def __init__(self):
        super().__init__()
        self.table, self.layers, self.head = nn.Embedding(30, 16), nn.LSTM(16, 16, 3, batch_first=True), nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.layers(self.table(ids))[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_expected_peak_where_gradients_arrive_slice_by_slice(micro_batches, precision):
    if precision == "bf16" and not has_lstm_in_bf16():
        pytest.skip("eager has no LSTM in bf16 on this CPU")
    model, ids = Recurrent(), torch.randint(30, (16, 10))
    options = {**OPTIONS, "micro_batches": micro_batches, "precision": precision}
    expected = l2l_compile.explain(model, options)(ids).device_memory
    step = torch.compile(model, backend="l2l", options=options)
    step(ids).float().pow(2).mean().backward()
    assert expected.peak == pytest.approx(peak(step), rel=0.001)


def test_a_list_within_a_layer_is_no_stack_of_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.feed = Layer(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            x = y = self.first(x)
            for feed in self.feed:
                y = torch.tanh(feed(y))
            return x + y

    class Model(Tower):
        def __init__(self, depth):
            super().__init__(depth, lambda width: Block())

        def forward(self, a, b):
            return F.mse_loss(super().forward(a), b)

    report = l2l_compile.explain(Model(4).double(), OPTIONS)(*both())
    assert not report.uncut
