"""Where rows mix, only that is run on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import WIDTH, Layer, Stack, assert_parity, rows


def runs(step) -> dict[str, int]:
    """Micro-batches of each segment, by its name."""
    return {s.name: s.micro_batches for p in l2l_compile.programs(step) for s in p.segments}


class Normalised(nn.Module):
    """Linear layers with a BatchNorm in each."""

    def __init__(self, depth=3):
        super().__init__()

        def layer():
            return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

        self.layers = nn.ModuleList([layer() for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_only_a_batch_norm_sees_the_whole_batch():
    step = assert_parity(Normalised().double(), rows(6, WIDTH), rows(5, WIDTH))
    whole = [s for p in l2l_compile.programs(step) for s in p.segments if s.micro_batches == 1]
    assert [s.parameter_names for s in whole] == [(f"layers.{i}.1.weight", f"layers.{i}.1.bias") for i in range(3)]
    assert all("normalises over the batch" in s.block.reason and s.block.repeats == 3 for s in whole)
    inner = [s for p in l2l_compile.programs(step) for s in p.segments if s.micro_batches == 3]
    assert {n for s in inner for n in s.parameter_names} == {
        f"layers.{i}.{k}.{n}" for i in range(3) for k in (0, 3) for n in ("weight", "bias")
    }


def test_in_eval_nothing_does():
    model = Normalised().double().eval()
    step = assert_parity(model, rows(6, WIDTH))
    assert set(runs(step).values()) == {3}


class Contrastive(nn.Module):
    """Two towers; every row of one is compared with every row of the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Stack(3), Stack(2)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x, y):
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = self.scale.exp() * a @ b.t()
        target = torch.arange(len(scores))
        return {"loss": (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2}


def test_towers_stay_in_the_inner_loop():
    step = assert_parity(Contrastive().double(), (rows(6), rows(6)), (rows(5), rows(5)))
    found = runs(step)
    assert {count for name, count in found.items() if name.startswith(("left", "right"))} == {3}
    assert sum(count == 1 for count in found.values()) == 1


class Auxiliary(nn.Module):
    """As a mixture of experts: every layer adds to a loss that multiplies two means over the batch."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.routers = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(depth)])

    def forward(self, x):
        routed = []
        for layer, router in zip(self.layers, self.routers, strict=True):
            routed.append(router(x).flatten(0, 1))
            x = layer(x) + router(x).softmax(-1).sum(-1, keepdim=True)
        scores = torch.cat(routed).softmax(-1)
        chosen = F.one_hot(scores.topk(2, -1).indices, 4).double()
        auxiliary = (chosen.mean(0) * scores.mean(0).unsqueeze(0)).sum() * 4
        return {"loss": x.pow(2).mean() + 0.1 * auxiliary, "auxiliary": auxiliary}


def test_a_product_of_two_means_runs_once():
    step = assert_parity(Auxiliary().double(), rows(6, 3, WIDTH), rows(5, 3, WIDTH))
    whole = [s for p in l2l_compile.programs(step) for s in p.segments if s.micro_batches == 1]
    assert len(whole) == 1 and not any(spec.batch for spec in whole[0].block.values)  # it reads sums, no rows


class Two(nn.Module):
    """Two layers, and whatever stands between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)


def test_operations_between_writes_and_modes_keep_their_order():
    """A write into a value, and regions without gradients, where the row-wise part could overtake them."""

    class Model(Two):
        def forward(self, x):
            y = self.first(x)
            before = y.sin()
            centre = y.amax(0)
            y = y * 1.0
            y.add_(centre)
            with torch.no_grad():
                fixed = self.second(y) - centre
            y.mul_(2.0)
            return self.second(y.cos()) + before + fixed

    assert_parity(Model().double(), rows(6), rows(8))


def test_rows_that_are_ordered_by_the_batch_are_whole():
    class Model(Two):
        def forward(self, x):
            return self.second(self.first(x).cumsum(0).sort(0).values.tanh())

    step = assert_parity(Model().double(), rows(6))
    assert sorted(runs(step).values()) == [1, 3, 3]


@pytest.mark.parametrize("size", [lambda y: y.size(), lambda y: (*y.shape[:2], 1), lambda y: (y.shape[0], -1, 1)])
def test_sizes_may_be_read_on_both_sides_of_a_cut(size):
    class Model(Two):
        def forward(self, x):
            y = self.first(x)
            shape = size(y)
            return {"loss": self.second(y.amax(0) + y).reshape(shape).pow(2).mean()}

    assert_parity(Model().double(), rows(6), rows(8))


def test_each_reader_numbers_the_rows_itself():
    """`arange` over the batch is made where it is read: in the inner loop for a look-up, whole for the targets of a loss."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Stack(3), nn.Linear(WIDTH, 3)

        def forward(self, x, last):
            numbers = torch.arange(len(x))
            y = self.head(self.body.layers[0](self.body.embed(x))[numbers, last])
            return {"loss": F.cross_entropy(y @ y.t(), numbers)}

    step = assert_parity(Model().double(), (rows(6, 4, 5), torch.randint(4, (6,))))
    assert {s.micro_batches for p in l2l_compile.programs(step) for s in p.segments if s.parameter_names} == {3}
    assert min(runs(step).values()) == 1


class Groups(nn.Module):
    """Hands values from layer to layer in groups of so many rows; the second size is `B // (B // rows)`."""

    def __init__(self, size):
        super().__init__()
        self.size, self.first, self.second = size, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        grouped = self.first(x).reshape(len(x) // self.size, -1, 8)
        return {"loss": self.second(grouped).softmax(1).square().mean()}


@pytest.mark.parametrize("size", [4, 50])
def test_sizes_that_smaller_batches_do_not_have(size):
    step = assert_parity(Groups(size).double(), rows(2 * size, 8), rows(3 * size, 8))
    (program,) = l2l_compile.programs(step)
    second = next(s for s in program.segments if "second.weight" in s.parameter_names)
    assert "no dimension that holds the rows" in second.block.reason
