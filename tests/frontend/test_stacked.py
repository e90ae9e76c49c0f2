"""Parameters that hold the weights of all layers: slices are fetched, pushed and updated as weights of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from l2l_compile.passes.pipeline import SEGMENTATION
from l2l_compile.testing import training_equivalent
from models import assert_parity, compilation, compiled, pair_of, rows
from structures import WIDTH, Stacked, StackedPairs

CUT = SEGMENTATION[:2]
OPTIONS = {"micro_batches": 3, "block_compiler": "eager"}


def both(count=6):
    return rows(count, 5, WIDTH), rows(count, 5, WIDTH)


class Read(nn.Module):
    """A stacked weight `[4, WIDTH, WIDTH]` that `read` takes apart into a weight for each layer."""

    def __init__(self, read, *shape):
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(*(shape or (4, WIDTH, WIDTH)), dtype=torch.float64) * 0.1), read

    def forward(self, a, b):
        for w in self.read(self.weight):
            a = a + torch.tanh(a @ w)
        return F.mse_loss(a, b)


WAYS = {
    "index": lambda w: [w[i] for i in range(4)],
    "negative index": lambda w: [w[-1 - i] for i in range(4)],
    "slice": lambda w: [w[i : i + 1].squeeze(0) for i in range(4)],
    "iteration": list,
    "unbind": lambda w: w.unbind(0),
    "select": lambda w: [torch.select(w, 0, i) for i in range(4)],
    "narrow": lambda w: [w.narrow(0, i, 1)[0] for i in range(4)],
    "viewed": lambda w: [w.view(2, 2, WIDTH, WIDTH)[i // 2][i % 2] for i in range(4)],
    "nested index": lambda w: [w.view(2, 2, WIDTH, WIDTH)[i // 2, i % 2] for i in range(4)],
}


@pytest.mark.parametrize("way", WAYS)
def test_each_slice_is_a_weight_of_its_layer(way):
    model = Read(WAYS[way])
    found = compilation(model, *both(), passes=CUT)
    assert max(s.parameter_bytes for s in found.segments) == WIDTH * WIDTH * 8
    assert [n for s in found.segments for n in s.parameter_names] and len(
        {n for s in found.segments for n in s.parameter_names}
    ) == 4
    assert_parity(model, both())


def test_rows_of_a_flat_stack_are_weights_too():
    model = Read(lambda w: [w[i * WIDTH : (i + 1) * WIDTH] for i in range(4)], 4 * WIDTH, WIDTH)
    found = compilation(model, *both(), passes=CUT)
    assert [n for s in found.segments for n in s.parameter_names] == [f"weight[{i * WIDTH}:{(i + 1) * WIDTH}]" for i in range(4)]
    assert_parity(model, both())


WHOLE = {
    "columns, in several pieces of memory": lambda w: [w[:, i * WIDTH : (i + 1) * WIDTH] for i in range(2)],
    "one slice": lambda w: [w[:WIDTH, :WIDTH] if w.shape[1] > WIDTH else w[0]],
    "chunks, as fused projections are taken apart": lambda w: [c[:, :WIDTH] for c in w.chunk(2)],
    "rows that data choose": lambda w: [w[torch.arange(WIDTH) + i][:, :WIDTH] for i in range(2)],
}


@pytest.mark.parametrize("way", WHOLE)
def test_what_is_no_slice_in_one_piece_is_read_whole(way):
    model = Read(WHOLE[way], 2 * WIDTH if "chunk" in way or "data" in way else WIDTH, 2 * WIDTH)
    found = compilation(model, *both(), passes=CUT)
    assert {n for s in found.segments for n in s.parameter_names} == {"weight"}
    assert_parity(model, both())


def test_parameter_read_whole_and_by_slices_gets_both_gradients():
    class Regularised(Stacked):
        def forward(self, a, b):
            return super().forward(a, b) + 0.1 * self.weight.pow(2).sum() + self.weight[1].abs().mean()

    assert_parity(Regularised(4).double(), both(), both(7))


def test_slices_that_overlap_add_up():
    model = Read(lambda w: [w[0:2].sum(0), w[1:3].sum(0), w[2], w[3]])
    assert_parity(model, both())


def test_frozen_stack_is_fetched_by_slices():
    model = StackedPairs(4).double()
    model.up.requires_grad_(False)
    step = assert_parity(model, both())
    (program,) = l2l_compile.programs(step)
    assert max(s.parameter_bytes for s in program.segments) < sum(p.numel() * 8 for p in model.parameters()) / 3


def test_slices_under_no_grad_take_no_gradient():
    class Mixed(Stacked):
        def forward(self, a, b):
            with torch.no_grad():
                b = b @ self.weight[0] @ self.weight[1]
            return super().forward(a, b)

    assert_parity(Mixed(4).double(), both())


@pytest.mark.parametrize("stash", ["host", "device"])
def test_parity_on_a_device_apart_from_the_host(stash, threaded):
    assert_parity(StackedPairs(4).double(), both(), both(7), stash=stash)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compile_update", [True, False])
@pytest.mark.parametrize("updates", [("in_backward",), ("in_forward",)], ids=str)
def test_updates_are_those_of_at_step_and_at_step_is_eager(updates, precision, compile_update):
    training_equivalent(
        StackedPairs(4),
        [[t.float() for t in both()] for _ in range(3)],
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        updates=updates,
        options={**OPTIONS, "precision": precision, "compile_update": compile_update},
        dtype=None,
    )


@pytest.mark.parametrize("where", ["new memory", "elsewhere in one buffer"])
def test_parameter_that_moves_is_read_where_it_is_now(where):
    model = Stacked(4).double()
    pair = pair_of(model)
    size = model.weight.numel()
    buffer = torch.randn(2 * size, dtype=torch.float64) * 0.1
    for turn in range(2):
        moved = buffer[turn * size : (turn + 1) * size].view_as(model.weight)
        model.weight.data = moved if "buffer" in where else moved.clone()
        pair.eager.weight.data = moved.clone()
        pair.step(*both()).check()


def test_a_stack_that_the_model_writes_into_is_refused():
    class Clamped(Stacked):
        def forward(self, a, b):
            a = torch.tanh(a @ self.weight[0])
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
            return super().forward(a, b)

    with pytest.raises(l2l_compile.L2LError, match="weight"):
        compiled(Clamped(4).double())(*both())


def test_saved_state_has_the_parameter_whole():
    model = Stacked(4).double()
    step = compiled(model)
    step(*both()).backward()
    assert list(model.state_dict()) == ["weight"] and model.weight.grad.shape == model.weight.shape
