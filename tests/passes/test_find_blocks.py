"""Layers are found, and only layers."""

from __future__ import annotations

import torch
from torch import nn

from l2l_compile.passes.pipeline import SEGMENTATION
from models import (
    WIDTH,
    Attention,
    BiasOfFirst,
    EncoderDecoder,
    Funnel,
    Layer,
    Shared,
    Stack,
    UNet,
    compilation,
    functional,
    repeated,
    rows,
)

FOUND = SEGMENTATION[:1]
CUT = SEGMENTATION[:2]


def names(container: str, *indices: int) -> list[str]:
    return [f"{container}.{i}" for i in indices]


def test_plain_stack_is_one_block_of_all_layers():
    found = compilation(Stack(5).double(), rows(6), passes=CUT)
    assert repeated(found) == [names("layers", 0, 1, 2, 3, 4)]


def test_two_layers_are_enough():
    found = compilation(Stack(2).double(), rows(6), passes=CUT)
    assert repeated(found) == [names("layers", 0, 1)]


def test_embedding_and_head_are_segments_of_their_own():
    found = compilation(Stack(3).double(), rows(6), passes=CUT)
    assert found.segments[0].parameter_names == ("embed.weight", "embed.bias")
    assert found.segments[-1].parameter_names == ("head.weight", "head.bias")


def test_encoder_and_decoder_are_a_block_each():
    model = EncoderDecoder().double()
    found = compilation(model, rows(6, 4, WIDTH), passes=CUT)
    encoder = [s for s in found.segments if s.name.startswith("encoder.")]
    decoder = [s for s in found.segments if s.name.startswith("decoder.")]
    assert len(encoder) == len(decoder) == 3
    assert len({s.block for s in encoder[1:]}) == 1  # the first reads the input, which wants no gradient
    assert len({s.block for s in decoder[1:]}) == 1
    assert not {s.block for s in encoder} & {s.block for s in decoder}


def test_layer_that_makes_the_position_bias_stands_apart():
    found = compilation(BiasOfFirst().double(), rows(6, 4, WIDTH), passes=CUT)
    assert repeated(found) == [names("layers", 1, 2, 3)]
    first = [s for s in found.segments if "table" in " ".join(s.parameter_names)]
    assert all(n.startswith("layers.0.") for s in first for n in s.parameter_names)


def test_alternating_kinds_of_layer_are_two_blocks():
    layers = [kind for _ in range(3) for kind in (Layer(activation=torch.tanh), Attention())]
    model = Stack(layers).double()
    found = compilation(model, rows(6, 4, 5), passes=CUT)
    assert sorted(repeated(found)) == [names("layers", 0, 2, 4), names("layers", 1, 3, 5)]


def test_shared_weights_are_one_block_run_several_times():
    found = compilation(Shared(4).double(), rows(6), passes=CUT)
    (layers,) = [[s for s in found.segments if s.block is b] for b in found.blocks if b.repeats > 1]
    assert len(layers) == 4
    assert len({s.parameter_names for s in layers}) == 1


def test_skips_of_a_u_net_do_not_hide_the_layers():
    found = compilation(UNet(6).double(), rows(6, WIDTH), passes=CUT)
    assert all(len({n.rsplit(".", 1)[0] for n in s.parameter_names}) <= 1 for s in found.segments)
    runs = repeated(found)
    assert len(runs) == 2 and all(len(run) >= 4 for run in runs)  # all but the ends of both stacks


def test_stack_of_plain_functions_is_found_without_module_names():
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    found = compilation(functional, rows(6, WIDTH), weights, passes=CUT)
    assert max(b.repeats for b in found.blocks) >= 4  # the first reads an input that wants no gradient
    assert all(len(s.parameter_names) == 1 for s in found.segments)


def test_pieces_without_repeats_are_no_larger_than_a_layer():
    model = Funnel().double()
    found = compilation(model, rows(6), passes=CUT)
    assert not found.layers and len(found.segments) > 2
    largest = max(sum(p.numel() * 8 for p in m.parameters()) for m in model)
    assert max(s.parameter_bytes for s in found.segments) <= largest


def test_cuts_of_a_model_without_repeats_are_narrow():
    # 600, 202, 192 and 390 parameters; of the ways to cut into pieces of at most 600, one passes 100 + 2 columns a row
    model = nn.Sequential(
        nn.Linear(5, 100), nn.Tanh(), nn.Linear(100, 2), nn.Sigmoid(), nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 6)
    )
    found = compilation(model.double(), rows(6), passes=CUT)
    crossing = [found.captured.specs[v.node].shape[1] for s in found.segments for v in s.outputs]
    assert crossing == [100, 2, 6]


def test_three_projections_of_one_input_are_not_layers():
    found = compilation(Attention(norm=False).double(), rows(6, 4, WIDTH), passes=FOUND)
    assert found.layers == []


def test_projections_do_not_cut_the_layers_that_hold_them():
    model = Stack([Attention(norm=False) for _ in range(3)]).double()
    found = compilation(model, rows(6, 4, 5), passes=CUT)
    assert repeated(found) == [names("layers", 0, 1, 2)]


def test_weights_tied_between_embedding_and_head_keep_the_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layers = nn.Embedding(11, WIDTH), nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers:
                x = layer(x)
            return x @ self.table.weight.T

    found = compilation(Tied().double(), torch.randint(11, (6, 4)), passes=CUT)
    assert repeated(found) == [names("layers", 0, 1, 2)]
    assert [s.parameter_names for s in (found.segments[0], found.segments[-1])] == [("table.weight",)] * 2


def test_value_collected_from_every_layer_does_not_split_them():
    class Collecting(Stack):
        def forward(self, x):
            x, states = self.embed(x), []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return self.head(x), states

    found = compilation(Collecting(4).double(), rows(6), passes=CUT)
    assert [len(run) for run in repeated(found)] == [4]


def test_a_layer_with_a_few_more_parameters_is_one_segment():
    model = Stack([Layer(activation=nn.PReLU()), *(Layer(activation=torch.tanh) for _ in range(3))])
    found = compilation(model.double(), rows(6), passes=CUT)
    assert [s.name for s in found.segments[1:-1]] == names("layers", 0, 1, 2, 3)


def test_parts_of_a_layer_in_a_list_are_no_layers_however_alike():
    """As in T5's decoder: self- and cross-attention, of classes of their own, are the same operations on other weights."""

    class Itself(Attention):
        pass

    class Other(Attention):
        pass

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ModuleList([Itself(), Other(), Mlp()])

        def forward(self, x):
            for part in self.layer:
                x = part(x)
            return x

    found = compilation(Stack([Block() for _ in range(4)]).double(), rows(6, 4, 5), passes=CUT)
    assert [sorted({n.split(".")[1] for n in s.parameter_names}) for s in found.segments[1:-1]] == [["0"], ["1"], ["2"], ["3"]]
