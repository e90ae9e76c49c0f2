"""Layers of `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`: the numbers of the model that is not sharded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from steps import OPTIONS, assert_same, mean_of_eager, whole
from test_mean import FLOOR, llama_loss, numbers, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import l2l_compile
from l2l_compile import L2LError


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
    def __init__(self, count: int = 3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(count)), nn.Linear(5, 2)

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
    "one layer": (lambda: Layers(1), parallel_layers, lambda m, x: m(x), numbers),
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
    assert all(segment.block.inner_looped for segment in program.segments if "layers" in segment.name)
    return [segment.name for segment in program.segments]


@pytest.mark.parametrize(
    ("kind", "compiler"), [("one layer", "inductor"), ("layers", "eager"), ("llama", "eager")], ids=lambda v: v
)
@pytest.mark.slow(but="layers-eager")
def test_two_ranks_have_the_numbers_of_the_unsharded_model(ranks, kind, compiler):
    names, others = ranks.run(equals_the_whole_model, kind, {"block_compiler": compiler})
    assert names == others and sum("layers" in name for name in names) >= (1 if kind == "one layer" else 3)


def equals_the_mean_of_the_rows(rank, world):
    """Two ranks share a layer, and two such pairs have rows of their own."""
    torch.manual_seed(0)
    plain = Layers().double()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallel_layers(model, mesh["tp"])
    l2l_compile.shard(model, mesh)
    shards = [p.to_local().numel() for p in model.parameters()]
    assert sum(shards) < 0.4 * sum(p.numel() for p in plain.parameters())
    step = torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (plain, model)]
    for number in range(2):
        expected = mean_of_eager(plain, [lambda m, r=r, n=number: m(numbers(r, n)) for r in range(2)])
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        step(numbers(mesh.get_local_rank("dp"), number)).backward()
        assert_same(whole(model, gradients=True), expected, FLOOR)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole(model), {n: p.detach() for n, p in plain.named_parameters()}, FLOOR)


@pytest.mark.slow
def test_parallel_layers_are_sharded_over_further_ranks(ranks):
    ranks.run(equals_the_mean_of_the_rows, world=4)


def whole_at_the_end(model, mesh):
    parallel_layers(model, mesh)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def columns_of_a_whole(model, mesh):
    parallelize_module(model.layers[0], mesh, {"down": RowwiseParallel(input_layouts=Replicate())})


def uneven(model, mesh):
    model.head = nn.Linear(5, 3)
    parallelize_module(model, mesh, {"head": ColwiseParallel()})


class ReadsItsPart(nn.Module):
    """A parameter of its own making, read as this rank's part."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(2, 5), mesh, [Shard(0)] * mesh.ndim))

    def forward(self, x):
        return x @ self.weight.to_local().T


def read_as_a_part(model, mesh):
    model.head = ReadsItsPart(mesh)


def on_a_mesh_of_two_dimensions(model, mesh):
    model.head = ReadsItsPart(init_device_mesh("cpu", (1, 2)))


REFUSED = {
    read_as_a_part: ({}, r"parameter .*head.*weight.* is a DTensor with .*'\w+' uses it in another way"),
    on_a_mesh_of_two_dimensions: ({}, r"parameter .*head.*weight.* is a DTensor with .*, and its mesh has several dimensions"),
    whole_at_the_end: (
        {},
        r"parameter .*head.*weight.* is a DTensor with .*Shard\(dim=0\).* on DeviceMesh\(\(tp=2\).*'outputs\w*' uses it in another way",
    ),
    columns_of_a_whole: ({}, r"parameter .*layers.*down.*weight.* is a DTensor with .* on DeviceMesh\(\(tp=2\).* in another way"),
    uneven: ({}, r"parameter .*head.*weight.* is a DTensor with .*, and its 3 rows or columns are not a multiple of the ranks"),
    parallel_layers: (
        {"update": "in_backward"},
        r"parameter .* on DeviceMesh\(\(tp=2\).*: the option 'optimizer' needs .*shard with a mesh of two",
    ),
}


@pytest.fixture
def two_ranks():
    """This process is the first of two; nobody answers for the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("parallelize", REFUSED, ids=lambda f: f.__name__)
def test_other_layers_are_refused_with_parameter_and_mesh(two_ranks, parallelize):
    options, sentence = REFUSED[parallelize]
    model = Layers()
    parallelize(model, two_ranks)
    if options:
        options = {**options, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(L2LError, match=sentence):
        l2l_compile.explain(model, {**OPTIONS, **options})(torch.randn(4, 5))


def test_shard_takes_parallel_layers_with_a_2d_mesh_alone(two_ranks):
    model = Layers()
    parallel_layers(model, two_ranks)
    with pytest.raises(L2LError, match="is sharded over ranks already: .*; after parallelize_module, with the mesh of both"):
        l2l_compile.shard(model, two_ranks)


def test_models_with_and_without_parallel_layers_take_one_mesh(two_ranks):
    """Those that share parallel layers would count the other model's parameters twice."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    l2l_compile.shard(Layers(1), both["dp"])
    with pytest.raises(L2LError, match="another model was sharded over .*dp=1.*: pass the mesh of two dimensions, .*dp=1, tp=2"):
        l2l_compile.shard(Layers(1), both)


def test_a_layer_sums_over_ranks_as_often_as_it_has_to(two_ranks):
    """Forward: once behind attention, once behind the MLP. Backward: the former again, and the gradients of what each of them reads."""
    model = wide_llama()
    parallel_llama(model, two_ranks)
    ids = tokens(0, 0, 31)
    (program,) = l2l_compile.explain(model, OPTIONS)(input_ids=ids, labels=ids).programs
    block = next(s.block for s in program.segments if "layers" in s.name)
    sums = [
        len(module.graph.find_nodes(op="call_function", target=torch.ops.l2l_compile.sum_over_ranks.default))
        for module in (program.forward_of(block), program.backward_of(block))
    ]
    assert sums == [2, 3]
