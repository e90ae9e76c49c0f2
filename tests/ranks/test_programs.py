"""Programs of a sharded model: what they print, what parses back, and which rules they keep. No process but this one: `fake` ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import l2l_compile
from l2l_compile import L2LError, Program, VerifyError
from l2l_compile.ir import nodes
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.verify import verify
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.testing import compare
from models import Stack, rows

FACTS = frozenset().union(*(step.provides for step in PIPELINE))
OPTIONS = {"device": "cpu", "micro_batches": 2}
PRINTED = Path(__file__).with_name("program_of_64_ranks.txt")


@pytest.fixture
def world(request):
    """The number of ranks, of which this process is the first; nobody answers for the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def program(world: int, model: nn.Module | None = None, **options) -> Program:
    torch.manual_seed(0)
    model = l2l_compile.shard(model or Stack(3), init_device_mesh("cpu", (world,)))
    (found,) = l2l_compile.explain(model, {**OPTIONS, **options})(rows(6).float()).programs
    return found


def collectives(graph) -> list[str]:
    return [node.name for node in graph.graph.nodes if nodes.lane_of(node) == Lane.COMM]


@pytest.mark.parametrize("world", [64], indirect=True)
def test_the_program_of_64_ranks_parses_back_and_is_legal(world):
    found = program(world)
    shown = str(found)
    assert shown.startswith("ranks: 64\nsizes: ")
    lines = [line.split("#")[0].rstrip() for line in shown.splitlines()]
    fetched = next(line for line in lines if "fetch_weights('layers.0')" in line)
    gathered = next(line for line in lines if "all_gather_weights('layers.0'" in line)
    # 8 x 8 entries at most: norm 1 + 1, up 8 + 1, down 16 + 1 entries of each rank, padding included
    assert fetched.split()[-2:] == ["112", "B"] and gathered.split()[-2:] == ["1.2", "KiB"]
    assert collectives(found.forward) == ["all_gather_weights", *(f"all_gather_weights_{i}" for i in range(1, 5))]
    kinds = [name.partition("_weights")[0].partition("_gradients")[0] for name in collectives(found.backward)]
    gather, reduce = "all_gather", "reduce_scatter"
    assert kinds == [gather, gather, reduce] + [gather, reduce] * 3 + [reduce]
    parsed = Program.parse(shown)
    assert str(parsed) == shown
    verify(Compilation.of(parsed, Options.build(OPTIONS)), FACTS)


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3}, {"stash": "device"}], ids=str)
def test_programs_are_legal_and_a_gather_stands_behind_its_fetch(world, options):
    found = program(world, **options)
    for graph in (found.forward.graph, found.backward.graph):
        for node in graph.find_nodes(op="call_function", target=nodes.all_gather_weights):
            assert node.prev is nodes.operands(node).slab
    verify(Compilation.of(found, Options.build({**OPTIONS, **options})), FACTS)


def read_too_early(graph):
    gather = graph.find_nodes(op="call_function", target=nodes.all_gather_weights)[1]
    run = next(user for user in gather.users if nodes.runs_segment(user))
    nodes.set_operands(run, weights=nodes.operands(gather).slab)


def another_slab(graph):
    first, second = graph.find_nodes(op="call_function", target=nodes.all_gather_weights)[:2]
    nodes.set_operands(second, slab=nodes.operands(first).slab)


def not_reduced(graph):
    push = graph.find_nodes(op="call_function", target=nodes.push_gradients)[0]
    nodes.set_operands(push, gradients=nodes.operands(nodes.operands(push).gradients).gradients)


def reduced_twice(graph):
    reduce = graph.find_nodes(op="call_function", target=nodes.reduce_scatter_gradients)[0]
    with graph.inserting_before(reduce):
        graph.call_function(nodes.reduce_scatter_gradients, reduce.args).meta = dict(reduce.meta)


BREAKS = {
    read_too_early: ("gathered", "is read before it is gathered"),
    another_slab: ("weights", "without the weights fetched for it"),
    not_reduced: ("reduced_once", "without a reduction over the ranks"),
    reduced_twice: ("reduced_once", "exactly once|not pushed"),
}


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_a_program_that_breaks_a_rule_is_refused(world, break_it):
    found = program(world)
    compilation = Compilation.of(found, Options.build(OPTIONS))
    break_it(compilation.backward)
    rule, finding = BREAKS[break_it]
    with pytest.raises(VerifyError, match=finding) as caught:
        verify(compilation, FACTS - {Fact.RELEASED})
    assert caught.value.rule == rule


@pytest.mark.parametrize("world", [64], indirect=True)
def test_the_program_of_64_ranks_is_the_one_that_is_kept(world):
    """`UPDATE_DOCUMENTS=1` writes it anew."""
    shown = re.sub(r"\bs\d+\b", "rows", str(program(world, Mixing(2), batch_scope="global"))) + "\n"  # PyTorch numbers the symbol
    if os.environ.get("UPDATE_DOCUMENTS"):
        PRINTED.write_text(shown)
    assert shown == PRINTED.read_text()


@pytest.mark.parametrize("world", [2, 5, 64], indirect=True)
def test_the_share_of_a_rank_is_that_of_its_program(world, monkeypatch):
    """Computed from the program of the model that is not sharded, padding included."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    from shares import share_of

    model = Stack(3)
    (plain,) = l2l_compile.explain(model, OPTIONS)(rows(6).float()).programs
    share, alone, found = share_of(plain, world), share_of(plain, 1), program(world, model)
    moved = [
        node
        for graph in found.graphs.values()
        for node in graph.nodes
        if node.target in (nodes.fetch_weights, nodes.push_gradients)
    ]
    assert share.link == sum(node.meta["bytes"] for node in moved)
    largest = sum(p.to_local().numel() for p in model.parameters())  # this process is rank 0
    assert share.host == 16 * largest and alone.host == 16 * sum(p.numel() for p in model.parameters())
    assert alone.between == 0 < share.between and share.slabs >= alone.slabs


class Mixing(Stack):
    """A statistic of the rows, which the rows read again, and a mean."""

    def forward(self, x):
        x = super().forward(x)
        return ((x - x.mean(0)) * x.std(0)).pow(2).mean()


def own_rows_alone(graph):
    gathered = graph.find_nodes(op="call_function", target=nodes.all_gather_rows)[0]
    gathered.replace_all_uses_with(nodes.operands(gathered).x, delete_user_cb=lambda user: nodes.runs_segment(user))


def rows_of_all(graph):
    own = graph.find_nodes(op="call_function", target=nodes.local_rows)[0]
    own.replace_all_uses_with(nodes.operands(own).x, delete_user_cb=lambda user: user.target is not nodes.release)


def part_of_a_sum(graph):
    total = graph.find_nodes(op="call_function", target=nodes.all_reduce)[-1]
    total.replace_all_uses_with(nodes.operands(total).x, delete_user_cb=lambda user: user.target is not nodes.release)


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("break_it", [own_rows_alone, rows_of_all, part_of_a_sum], ids=lambda f: f.__name__)
def test_a_program_on_all_rows_that_breaks_its_rule_is_refused(world, break_it):
    found = program(world, Mixing(2), batch_scope="global")
    compilation = Compilation.of(found, Options.build({**OPTIONS, "batch_scope": "global"}))
    verify(compilation, FACTS)
    assert str(Program.parse(str(found))) == str(found)
    break_it(compilation.forward)
    with pytest.raises(VerifyError, match="rows_of_ranks") as caught:
        verify(compilation, FACTS - {Fact.RELEASED})
    assert caught.value.rule == "rows_of_ranks"


@pytest.mark.parametrize("world", [2], indirect=True)
def test_one_micro_batch_takes_no_rows_apart_unless_ranks_do(world):
    for batch, inner_looped in (("per_rank", False), ("global", True)):
        segments = program(world, batch_scope=batch, micro_batches=1).segments
        assert [bool(s.block.inner_looped) for s in segments] == [inner_looped] * len(segments)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_model_on_meta_takes_memory_for_its_shards_alone(world):
    with torch.device("meta"):
        model = Stack(3)
    found = program(world, model)
    assert str(found) == str(program(world))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        shard = parameter.to_local()
        assert (
            shard.device.type == "cpu"
            and shard.untyped_storage().nbytes() <= -(-parameter.shape[0] // world) * parameter[0:1].numel() * 4
        )


class Breaking(Stack):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.pow(2).mean()


class ReadsOtherwise(Stack):
    def forward(self, x):
        return super().forward(x), self.head._parameters["bias"].sum()


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Breaking, "spread over ranks, and its graph breaks.*graph_break"),
        (ReadsOtherwise, "parameter .*head.*bias.* reads it by another way than as an attribute"),
    ],
)
def test_what_cannot_run_in_step_with_other_ranks_is_refused(world, model, sentence):
    with pytest.raises(L2LError, match=sentence):
        program(world, model(2))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_parameter_that_is_not_sharded_is_refused(world):
    model = l2l_compile.shard(Stack(2), init_device_mesh("cpu", (world,)))
    model.head = nn.Linear(8, 3)
    with pytest.raises(L2LError, match=r"head.*is not sharded over ranks, but others are"):
        l2l_compile.explain(model, OPTIONS)(rows(6).float())


@pytest.mark.parametrize("world", [2], indirect=True)
def test_shard_refuses_what_it_cannot_shard(world):
    mesh = init_device_mesh("cpu", (world,))
    model = l2l_compile.shard(Stack(2), mesh)
    with pytest.raises(L2LError, match="'embed.weight' is sharded over ranks already"):
        l2l_compile.shard(model, mesh)
    with pytest.raises(L2LError, match="takes a mesh of one dimension, or of two with names, got one of 2"):
        l2l_compile.shard(Stack(2), init_device_mesh("cpu", (1, world)))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_layers_of_fully_shard_are_refused_with_a_remedy(world):
    model, mesh = Stack(2), init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(
        L2LError, match="layer 'layers.0' is sharded by fully_shard, .*: shard the plain model with l2l_compile.shard"
    ):
        torch.compile(model, backend="l2l", options=OPTIONS)(rows(4, dtype=torch.float32))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_sharded_model_is_not_compared(world):
    model = l2l_compile.shard(Stack(2), init_device_mesh("cpu", (world,)))
    with pytest.raises(
        L2LError, match="'embed.weight' of Stack is sharded .*: compare the plain model, before l2l_compile.shard"
    ):
        compare(model, OPTIONS)(rows(4, dtype=torch.float32))


def test_shards_of_all_ranks_are_the_tensor_with_padding():
    for count in range(12):
        for ranks in range(1, 7):
            shards = ShardSpec((count, 3), ranks)
            covered = [row for rank in range(ranks) for row in shards.span(rank)]
            assert covered == list(range(count))
            own = [len(chunk) for chunk in torch.arange(count).chunk(ranks)] if count else []
            assert [len(shards.span(rank)) for rank in range(ranks)] == own + [0] * (ranks - len(own))
            assert shards.padded == (shards.rows * ranks, 3) and shards.entries == shards.rows * 3
