"""The batch may be the second dimension of the inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import assert_parity, rows


class Encoder(nn.Module):
    """PyTorch's own encoder, given time first or batch first."""

    def __init__(self, batch_first: bool, depth: int = 2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head, self.time = nn.Linear(16, 5), int(batch_first)

    def forward(self, x, target):
        return {"loss": F.cross_entropy(self.head(self.encoder(x).mean(self.time)), target)}


class TimeFirst(nn.Module):
    """Indices [time, batch], targets of the same shape; attention with its heads folded behind the batch."""

    def __init__(self, depth: int = 2):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(depth)])
        self.head = nn.Linear(8, 20)

    def forward(self, ids, target):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())}


def micro_batches_of_weights(step) -> set[int]:
    return {s.micro_batches for p in l2l_compile.programs(step) for s in p.segments if s.parameter_names}


def classes(*shape: int, count: int = 5) -> torch.Tensor:
    return torch.randint(count, shape)


@pytest.mark.parametrize("time, batch", [(9, 6), (6, 9), (6, 6)])
@pytest.mark.slow(but="9-6")
def test_time_first(time, batch):
    step = assert_parity(
        Encoder(False).double(), (rows(time, batch, 16), classes(batch)), (rows(time, batch - 1, 16), classes(batch - 1))
    )
    assert micro_batches_of_weights(step) == {3}


def test_the_report_tells_where_the_batch_is():
    options = {"micro_batches": 3, "device": "cpu"}
    report = l2l_compile.explain(Encoder(False), options)(x=rows(9, 6, 16, dtype=torch.float32), target=classes(6))
    assert "'x' has the batch in dimension 1" in str(report) and "'target' has" not in str(report)
    report = l2l_compile.explain(Encoder(True), options)(rows(6, 9, 16, dtype=torch.float32), classes(6))
    assert "has the batch in" not in str(report)


def test_batch_first():
    step = assert_parity(Encoder(True).double(), (rows(6, 9, 16), classes(6)))
    assert micro_batches_of_weights(step) == {3}


def test_indices_and_targets_time_first():
    """The loss takes scores and targets as they were before time was folded with the batch: the head is row-wise as well."""
    ids, target = classes(7, 6, count=20), classes(7, 6, count=20)
    step = assert_parity(TimeFirst().double(), (ids, target))
    report = l2l_compile.explain(TimeFirst(), {"micro_batches": 3, "device": "cpu"})(ids, target)
    for programs in (l2l_compile.programs(step), report.programs):
        assert {s.micro_batches for p in programs for s in p.segments if s.parameter_names} == {3}


def test_both_dimensions_are_mixed():
    """Neither is better: the first stays the batch, and the numbers are right."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.sort(0).values.sort(1).values) + x.amax((0, 1))
            return x

    assert_parity(Mixing().double(), rows(6, 4, 8), rows(5, 4, 8))


def test_images_keep_their_batch():
    """A BatchNorm mixes rows; channels are no batch."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    step = assert_parity(model, rows(6, 3, 9, 9))
    assert micro_batches_of_weights(step) == {1, 3}


def test_one_row_of_a_varying_length():
    """Its length is the only size that changes; it is not the batch, and the layers stay whole."""
    batches = [(rows(*shape, 16), classes(shape[0])) for shape in ((6, 9), (6, 7), (1, 5))]
    step = assert_parity(Encoder(True).double(), *batches)
    last = l2l_compile.programs(step)[-1]
    assert last.captured.why_static == "a batch of one row cannot be split"
    assert [s.name for s in last.segments][:2] == ["encoder.layers.0", "encoder.layers.1"]


@pytest.mark.slow
def test_time_first_of_a_varying_length():
    batches = [(rows(*shape, 16), classes(shape[1])) for shape in ((9, 6), (7, 6), (8, 6), (8, 9), (5, 1))]
    step = assert_parity(Encoder(False).double(), *batches)
    for program in l2l_compile.programs(step)[:-1]:
        assert {s.micro_batches for s in program.segments if s.parameter_names} == {3}
