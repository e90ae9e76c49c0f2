"""Sizes that change: blocks are lowered with symbols, once for all sizes that PyTorch decides alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import l2l_compile
import l2l_compile.lowering.code_cache
import l2l_compile.lowering.lower
from l2l_compile.errors import LoweringError
from l2l_compile.ir.fingerprints import constant_fingerprint
from l2l_compile.testing import Pair
from models import WIDTH, Attention, assert_parity, compiled, forward_alone, loss_of, rows

LIBRARY = torch.library.Library("l2l_test_sizes", "DEF")
LIBRARY.define("short_or_mixed(Tensor x) -> Tensor")
LIBRARY.impl("short_or_mixed", lambda x: x.tanh() if x.shape[1] <= 8 else x.tanh() - x.mean(0), "CompositeImplicitAutograd")
LIBRARY.define("windowed(Tensor x) -> Tensor")
LIBRARY.impl("windowed", lambda x: x.tanh() if x.shape[1] <= 8 else x.tanh() + x.cumsum(1), "CompositeImplicitAutograd")


@pytest.fixture(autouse=True)
def nothing_lowered():
    torch._dynamo.reset()
    l2l_compile.lowering.code_cache.store.clear()


@pytest.fixture
def lowered(monkeypatch):
    """The names of blocks and what was lowered of them, in order."""
    made = []
    original = l2l_compile.lowering.lower.Lowering._traced

    def traced(self, block, sizes, which, wanted):
        made.append((block.name, which, wanted))
        return original(self, block, sizes, which, wanted)

    monkeypatch.setattr(l2l_compile.lowering.lower.Lowering, "_traced", traced)
    monkeypatch.setenv("L2L_CACHE", "0")  # what another test has traced would be read
    return made


class Deep(nn.Module):
    """Runs the first of its layers."""

    def __init__(self, layers: int, layer=Attention):
        super().__init__()
        self.layers, self.depth = nn.ModuleList(layer() for _ in range(layers)), layers

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x


def model_of(layers: int = 2, *, layer=Attention) -> nn.Module:
    torch.manual_seed(0)
    return Deep(layers, layer).double()


def step_at(model, step, *shape) -> None:
    """A step, compared with eager."""
    Pair(model, copy.deepcopy(model), step, tolerance=1e-10, loss=loss_of).step(rows(*shape, WIDTH)).check()


def counted(lowered, model, step, shapes) -> list[int]:
    """How much is lowered in a step of each shape."""
    counts = []
    for shape in shapes:
        del lowered[:]
        step_at(model, step, *shape)
        counts.append(len(lowered))
    return counts


def test_nothing_is_lowered_from_the_third_length_on(lowered):
    model = model_of()
    counts = counted(lowered, model, compiled(model), [(6, t) for t in (9, 12, 17, 12, 9, 20, 64)])
    assert counts[0] > 0 and counts[1] > 0 and not any(counts[2:])


def test_nodes_keep_values_alone_and_those_of_others_everything(lowered):
    step = compiled(model_of())
    step(rows(6, 9, WIDTH)).sum().backward()
    (program,) = l2l_compile.programs(step)
    for block in program.blocks:
        made = [
            n
            for graph in (program.forward_of(block), program.backward_of(block))
            for n in graph.graph.find_nodes(op="placeholder")
        ]
        assert made and all("val" in n.meta and "tensor_meta" not in n.meta for n in made)
    (other,) = make_fx(torch.tanh, tracing_mode="fake")(rows(2)).graph.find_nodes(op="placeholder")
    assert other.meta["tensor_meta"].shape == (2, 5)


def test_dynamic_is_symbolic_at_once(lowered):
    model = model_of()
    counts = counted(lowered, model, compiled(model, dynamic=True), [(6, t) for t in (9, 12, 17)])
    assert counts[0] > 0 and not any(counts[1:])


def test_static_never_is(lowered):
    model = model_of()
    counts = counted(lowered, model, compiled(model, dynamic=False), [(6, 9), (6, 12), (6, 17), (5, 9)])
    assert all(counts)


def test_rows_of_a_micro_batch_are_a_symbol(lowered):
    model = model_of()
    step = compiled(model, micro_batches=4)
    for batch in (16, 15, 9, 3, 1, 16):
        step_at(model, step, batch, 9)
    assert max(lowered.count(made) for made in lowered) <= 2


def test_two_models_of_one_architecture_share_what_is_lowered(lowered):
    model = model_of()
    step_at(model, compiled(model), 6, 9)
    del lowered[:]
    torch._dynamo.reset()  # it would run the program that it has
    other = copy.deepcopy(model)
    step_at(other, compiled(other), 6, 9)
    assert not lowered


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch._inductor.config.patch(max_autotune=True),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["inductor", "attention"],
)
def test_other_settings_are_lowered_anew(monkeypatch, lowered, change):
    monkeypatch.setattr(l2l_compile.lowering.lower.compile_ahead, "compile_graph", lambda graph, device: graph)
    model = model_of()
    step_at(model, compiled(model, block_compiler="inductor"), 6, 9)
    first = list(lowered)
    del lowered[:]
    torch._dynamo.reset()  # it would run the program that it has
    with change():
        other = copy.deepcopy(model)
        step_at(other, compiled(other, block_compiler="inductor"), 6, 9)
    assert sorted(lowered) == sorted(first)


def test_evaluation_lowers_nothing_new(lowered):
    model = model_of()
    step = compiled(model)
    step_at(model, step, 6, 9)
    del lowered[:]
    pair, x = Pair(model.eval(), copy.deepcopy(model), step, tolerance=1e-12), rows(6, 9, WIDTH)
    pair.run(forward_alone, x).check()
    with torch.no_grad():
        pair.run(forward_alone, x).check()
    assert not lowered


def test_objects_of_equal_repr_are_not_the_same_constant():
    class Opaque:
        def __repr__(self):
            return "<opaque>"

    one = Opaque()
    assert constant_fingerprint(one) == constant_fingerprint(one) != constant_fingerprint(Opaque())
    assert constant_fingerprint(0.0) != constant_fingerprint(-0.0) and constant_fingerprint(1) != constant_fingerprint(True)
    assert constant_fingerprint(torch.zeros(2)) != constant_fingerprint(torch.zeros(2))


def test_training_does_not_run_what_evaluation_has_lowered(lowered):
    model = model_of()  # where gradients are wanted, PyTorch may choose other kernels for attention, as recompute does
    step = compiled(model)
    with torch.no_grad():
        step(rows(6, 9, WIDTH))
    counts = counted(lowered, model, step, [(6, 9)])
    assert [made for made in lowered if made[1] == "forward"] and counts[0]


def test_another_depth_lowers_nothing_new(lowered):
    model = model_of(6)
    step = compiled(model)
    counts = []
    for model.depth in (6, 3, 5, 4, 2):
        counts += counted(lowered, model, step, [(6, 9)])
    assert counts[0] > 0 and not any(counts[1:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Windowed(Layer):
    """An operation that looks further back where there is more than a window."""

    def forward(self, x):
        return x + torch.ops.l2l_test_sizes.windowed(self.linear(x))


class Branch(Layer):
    def forward(self, x):
        return x + (self.linear(x).tanh() if x.shape[1] > 8 else self.linear(x).cumsum(1))


class One(Layer):
    def forward(self, x):
        return x + (self.linear(x).tanh() if x.shape[1] == 1 else self.linear(x).softmax(1))


class Padded(Layer):
    """Pads to a multiple of 8, and cuts off again."""

    def forward(self, x):
        h = F.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return x + self.linear(h.unflatten(1, (-1, 8)).softmax(2).flatten(1, 2))[:, : x.shape[1]]


@pytest.mark.parametrize(
    "layer, lengths",
    [
        (Windowed, (6, 7, 12, 5, 13)),
        (Windowed, (12, 13, 6, 14, 5)),
        (Branch, (6, 7, 12, 5, 13)),
        (Branch, (12, 13, 6, 14, 5)),
        (One, (1, 6, 7, 1, 9)),
        (One, (6, 7, 1, 9)),
        (Padded, (8, 9, 16, 17, 5)),
        (Padded, (9, 11, 16, 24, 3)),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.slow(only="*-Padded-*")
def test_decisions_by_size_are_right_on_both_sides(layer, lengths, dynamic):
    assert_parity(model_of(layer=layer), *(rows(6, t, WIDTH) for t in lengths), dynamic=dynamic)


class MixesLater(Layer):
    def forward(self, x):
        return x + torch.ops.l2l_test_sizes.short_or_mixed(self.linear(x))


@pytest.mark.parametrize("lengths", [(5, 6, 9, 7, 10), (9, 10, 5, 11, 6)])
def test_rows_that_mix_at_some_sizes_only(lengths):
    model = model_of(layer=MixesLater)
    step = assert_parity(model, *(rows(6, t, WIDTH) for t in lengths), dynamic=True)
    assert {all(s.block.inner_looped for s in p.segments) for p in l2l_compile.programs(step)} == {True, False}


def test_code_without_a_symbolic_trace_is_lowered_for_each_size(monkeypatch, lowered):
    original = l2l_compile.lowering.lower.trace_forward

    def fails(block, sizes, device):
        if sizes.symbols:
            raise LoweringError("no symbols here")
        return original(block, sizes, device)

    monkeypatch.setattr(l2l_compile.lowering.lower, "trace_forward", fails)
    model = model_of()
    step = compiled(model)
    with pytest.warns(
        UserWarning, match=r"compiles block_\d+ anew for every size \(.*\), since with symbolic sizes: no symbols here"
    ):
        step_at(model, step, 6, 9)
    del lowered[:]
    step_at(model, step, 6, 9)
    assert not lowered
    step_at(model, step, 3, 9)
    assert lowered


class Scores(nn.Module):
    """A language model that folds its rows with their lengths before the loss, in one graph or behind a break."""

    def __init__(self, breaks: bool):
        super().__init__()
        self.table, self.layers, self.head, self.breaks = nn.Embedding(50, WIDTH), Deep(2), nn.Linear(WIDTH, 50), breaks

    def forward(self, ids, labels):
        scores = self.head(self.layers(self.table(ids)))
        if self.breaks:
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def compared_with_eager(model, step, shapes) -> None:
    """Steps on tokens of these shapes."""
    pair = Pair(model, copy.deepcopy(model), step, tolerance=1e-10)
    for shape in shapes:
        pair.step(torch.randint(50, shape), torch.randint(50, shape)).check()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.slow(but="None-True")
def test_scores_are_made_row_by_row_at_every_length(breaks, dynamic):
    """[rows, length, classes] seen as [rows * length, classes]: the length may be a symbol."""
    torch.manual_seed(0)
    model = Scores(breaks).double()
    step = torch.compile(
        model, backend="l2l", dynamic=dynamic, options={"micro_batches": 4, "device": "cpu", "block_compiler": "eager"}
    )
    compared_with_eager(model, step, [(8, 9), (8, 7), (6, 12), (3, 9)])
    for program in l2l_compile.programs(step):
        whole = [s for s in program.segments if not s.block.inner_looped]
        assert all(s.block.reason == "aten.nll_loss_forward.default reduces the batch dimension" for s in whole), whole
        assert all(len(v.shape) == 1 or v.shape[1] == 1 for s in whole for v in s.block.values)  # one number for each target


class TimeFirstScores(nn.Module):
    """Indices [time, batch]; the layers attend along time."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0) for _ in range(2))

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_scores_that_are_given_time_first_of_any_length():
    torch.manual_seed(0)
    model = TimeFirstScores().double()
    step = torch.compile(model, backend="l2l", options={"micro_batches": 2, "device": "cpu", "block_compiler": "eager"})
    compared_with_eager(model, step, [(9, 6), (7, 6), (8, 4)])
    last = l2l_compile.programs(step)[-1]
    assert {s.micro_batches for s in last.segments if s.parameter_names} == {2}
