"""Layers of `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`: the numbers of the model that is not divided."""

from __future__ import annotations

import copy

import pytest
import torch
from steps import OPTIONS, assert_same, whole
from test_mean import FLOOR, llama, llama_loss, numbers, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import l2l_compile


class Layer(nn.Module):
    """A layer without biases, and one with; what is between them mixes no columns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.gate, self.up, self.down = nn.Linear(5, 8, bias=False), nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(5, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean()


def parallel_layers(model: Layers, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})


def wide_llama():
    """One head of keys and values for each rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 34, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 31}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, use_cache=False, **sizes))


def parallel_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


MODELS = {
    "layers": (Layers, parallel_layers, lambda m, x: m(x), numbers),
    "llama": (wide_llama, parallel_llama, llama_loss, lambda r, s: tokens(r, s, 31)),
}


def equals_the_whole_model(rank, world, kind, options):
    build, parallelize, loss, batch = MODELS[kind]
    torch.manual_seed(0)
    plain = build().double()
    model = copy.deepcopy(plain)
    parallelize(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **options})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (plain, model)]
    for number in range(2):
        ours, theirs = (loss(m, batch(0, number)) for m in (step, plain))  # the same rows on all ranks
        torch.testing.assert_close(ours, theirs, rtol=FLOOR, atol=1e-14)
        ours.backward()
        theirs.backward()
        expected = {n: p.grad for n, p in plain.named_parameters()}
        assert_same(whole(model, gradients=True), expected, FLOOR)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole(model), {n: p.detach() for n, p in plain.named_parameters()}, FLOOR)
    (program,) = l2l_compile.programs(step)
    assert all(segment.block.inner_looped for segment in program.segments)
    return [segment.name for segment in program.segments]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{}, {"block_compiler": "inductor"}], ids=("eager", "inductor"))
def test_two_ranks_have_the_numbers_of_the_model_that_is_not_divided(ranks, kind, options):
    if options and kind == "llama":
        pytest.skip("one model is compiled")
    names, others = ranks.run(equals_the_whole_model, kind, options)
    assert names == others and sum("layers" in name for name in names) >= 3
