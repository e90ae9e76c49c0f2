"""Which rank gets what, what each rank sees of the model, and what is refused."""

from __future__ import annotations

import copy
import gc
import operator

import pytest
import torch
import torch.distributed as dist
from pipelines import MODELS, Case, UShape, run, train
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError, OptionError, RankError, VerifyError
from l2l_compile.estimate.balanced_stages import cut
from l2l_compile.integrations.owners import owners_by_names
from l2l_compile.ir import nodes
from l2l_compile.passes import verify_stages
from l2l_compile.ranks.pipeline_ranks import partners
from l2l_compile.report.stage_table import bubble, stage_table
from l2l_compile.runtime.messages import Arrival

LLAMA = Case("llama")


@pytest.mark.parametrize("size", range(2, 10))
def test_each_two_ranks_meet_once_in_a_tournament(size):
    rounds = list(zip(*(partners(rank, size) for rank in range(size)), strict=True))
    pairs = [tuple(sorted((rank, partner))) for met in rounds for rank, partner in enumerate(met) if rank < partner]
    assert len(pairs) == len(set(pairs)) == size * (size - 1) // 2
    assert all(met[partner] == rank for met in rounds for rank, partner in enumerate(met))


def test_stages_are_cut_where_the_largest_costs_least():
    assert cut([1, 1, 1, 1, 4], 2) == [range(4), range(4, 5)]
    assert cut([3, 1, 1, 1, 3], 3) == [range(1), range(1, 4), range(4, 5)]
    assert cut([1.0] * 6, 6) == [range(i, i + 1) for i in range(6)]


def test_the_bubble_is_that_of_the_papers():
    assert bubble(4, 8, 1) == 3 / 11 and bubble(4, 8, 2) == 3 / 19


def test_names_of_modules_place_parameters():
    model = UShape(2)
    found = owners_by_names(model, [["inside", "down.0"], ["down.1", "up"], ["out"]], 2)
    assert {name.split(".")[0] for name, rank in found.items() if rank == 0} == {"inside", "down", "out"}
    assert found["down.1.1.weight"] == found["up.0.1.weight"] == 1


def test_a_narrower_name_wins():
    model = UShape(2)
    model.register_parameter("phases", nn.Parameter(torch.ones(3)))
    for first in (["", "down.1"], ["phases", "inside", "down"]):
        stages = [first, ["up", "out"], ["up.0.1"]]
        found = owners_by_names(model, stages, 2)
        assert found["phases"] == found["inside.weight"] == found["down.1.1.weight"] == 0
        assert found["up.0.0.weight"] == found["up.1.1.weight"] == found["out.bias"] == 1
        assert found["up.0.1.weight"] == 0


class Tied(nn.Module):
    """An embedding whose weight is that of the head too."""

    def __init__(self):
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["inside", "down"], ["up", "outside"]], "names 'outside', which is neither a module of the model nor a parameter"),
        ([["inside", "down"], ["up"]], "'out.weight' is in no stage: name it in one, or a module that has it"),
        ([["inside", "down", "up", "out"], ["up.0"], ["up.0"]], "stages name 'up.0' for rank 1 and for rank 0"),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(stages, message):
    with pytest.raises(L2LError, match=message):
        owners_by_names(UShape(2), stages, 2)


def test_stages_that_divide_a_shared_parameter_are_refused():
    assert set(owners_by_names(Tied(), [["embed"], ["between"]], 2).values()) == {0, 1}
    with pytest.raises(L2LError, match="'embed.weight' would be on rank 0 for 'embed' and on rank 1 for 'head'"):
        owners_by_names(Tied(), [["embed"], ["between", "head"]], 2)


# ---- what a rank sees ---------------------------------------------------------------------------------------------------


def a_rank_sees_its_own_part(rank, world):
    whole = MODELS["llama"]()
    staged = train(LLAMA, world)
    model = staged.compiled._orig_mod
    mine = dict(model.named_parameters())
    names = [set() for _ in range(world)]
    dist.all_gather_object(names, set(mine))
    assert set.union(*names) == {name for name, _ in whole.named_parameters()} and not set.intersection(*names)
    held = sum(p.untyped_storage().nbytes() for p in mine.values())
    largest = max(sum(p.nbytes for p in m.parameters()) for m in whole.model.layers)
    total = sum(p.nbytes for p in whole.parameters())
    assert held <= total / world + largest
    (other,) = sorted(names[1 - rank])[:1]
    with pytest.raises(L2LError, match=f"'{other}' is on rank {1 - rank} of the pipeline, and this is rank {rank}"):
        model.get_parameter(other)
    with pytest.raises(L2LError, match="call the compiled model"):
        model(**LLAMA.batch(0))
    model.load_state_dict(whole.state_dict())  # of the whole model
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in mine.items())


def test_a_rank_sees_its_own_parameters_alone(ranks):
    ranks.run(a_rank_sees_its_own_part, world=2)


def values_are_those_of_the_first(rank, world):
    with torch.device("meta" if rank else "cpu"):
        other = UShape(2)
    with pytest.raises(
        L2LError, match="the model of rank 1 is another one than that of rank 0: 'inside.weight' .* on meta, trained in the place"
    ):
        l2l_compile.pipeline(other, init_device_mesh("cpu", (world,)), stages=[["inside", "down"], ["up", "out"]])
    torch.manual_seed(rank)
    model = UShape(2)
    model.register_buffer("phases", torch.randn(3))
    expected = [dict(model.state_dict())]
    dist.broadcast_object_list(expected)
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), stages=[["inside", "down"], ["up", "out"]])
    assert all(torch.equal(t, expected[0][name]) for name, t in model.state_dict().items())


def test_ranks_get_the_values_of_rank_0(ranks):
    ranks.run(values_are_those_of_the_first, world=2)


def without_gradients(rank, world):
    case = Case("llama", options={"outputs": "all"})
    staged = train(case, world)
    torch.manual_seed(0)
    eager = MODELS["llama"]()
    staged.compiled._orig_mod.load_state_dict(eager.state_dict())
    with torch.no_grad():
        output, expected = staged.compiled(**case.batch(0)), eager(**case.batch(0))
    assert abs(output.loss - expected.loss) < 1e-5
    assert output.logits.shape == expected.logits.shape
    if not output.logits.is_meta:
        assert torch.allclose(output.logits, expected.logits, atol=1e-5)
    return output.logits.is_meta


def test_outputs_with_rows_are_on_the_rank_that_makes_them(ranks):
    assert sorted(ranks.run(without_gradients, world=2)) == [False, True]


def memory_is_that_of_the_report(rank, world):
    for case in (LLAMA, Case("u_shape", loops=1), Case("mixtral")):
        staged = train(case, world)
        options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss"}
        report = l2l_compile.explain(staged.compiled._orig_mod, options)(**case.batch(3))
        assert l2l_compile.stats(staged.compiled).peak_device_bytes == report.device_memory.peak
        text = str(report)
        assert f"pipeline of {world} ranks, this is rank {rank}: " in text and "sends in forward" in text


def test_device_memory_is_that_of_the_report(ranks):
    ranks.run(memory_is_that_of_the_report, world=2)


# ---- models that are filled, copied, or run several times ---------------------------------------------------------------


def filled_in_every_way(rank, world, folder):
    alone = train(LLAMA)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    whole = MODELS["llama"]()
    if rank == 0:
        whole.save_pretrained(folder)
    dist.barrier()

    def from_folder(model):
        l2l_compile.load_pretrained(model, folder)
        return model

    def from_memory(model):
        model.to_empty(device="cpu")
        model.load_state_dict(whole.state_dict())
        model.model.rotary_emb = copy.deepcopy(whole.model.rotary_emb)
        return model

    for fill in (from_folder, from_memory, lambda model: copy.deepcopy(from_folder(model))):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = MODELS["llama"]()
        l2l_compile.pipeline(model, mesh["pp"], LLAMA.batch(0))
        if world > 2:
            l2l_compile.shard(model, mesh["dp"])
        l2l_compile.explain(model, {"device": "cpu"})(**LLAMA.batch(0))
        model = fill(model)
        assert run(LLAMA, model, torch.optim.AdamW(model.parameters(), lr=1e-2)).losses == alone.losses


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["stages", "sharded stages"])
def test_models_on_meta_are_filled_stage_by_stage(ranks, tmp_path, world):
    ranks.run(filled_in_every_way, str(tmp_path), world=world, seconds=200)


def messages_are_freed(rank, world):
    staged = train(LLAMA, world)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            staged.compiled(**LLAMA.batch(step)).loss.backward()
            staged.compiled(**LLAMA.batch(step))  # without a backward
        return sum(isinstance(each, Arrival) for each in gc.get_objects())
    finally:
        gc.enable()


def test_messages_are_freed_without_the_garbage_collector(ranks):
    assert ranks.run(messages_are_freed, world=2) == [0, 0]


def gradients_add_up(rank, world):
    found = []
    for stages in (1, world):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MODELS["llama"]()
        if stages > 1:
            l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), LLAMA.batch(0))
        compiled = torch.compile(model, backend="l2l", options={"device": "cpu", "micro_batches": 2, "block_compiler": "eager"})
        for step in range(3):
            (compiled(**LLAMA.batch(step)).loss / 3).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    alone, staged = found
    assert all(torch.equal(gradient, alone[name]) for name, gradient in staged.items())


def test_gradients_of_several_batches_add_up(ranks):
    ranks.run(gradients_add_up, world=2)


# ---- what is refused ----------------------------------------------------------------------------------------------------


class Scored(nn.Module):
    """A model that leaves the loss to the loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def refused(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    scored = Scored()
    with pytest.raises(L2LError, match="either a batch"):
        l2l_compile.pipeline(scored, mesh)
    with pytest.raises(L2LError, match="DeviceMesh of one dimension"):
        l2l_compile.pipeline(scored, init_device_mesh("cpu", (world, 1)), torch.ones(4, 4))
    with pytest.raises(L2LError, match="a pipeline of recurrent layers is not supported yet"):
        l2l_compile.pipeline(nn.Sequential(nn.LSTM(4, 4)), mesh, torch.ones(4, 4, 4))
    with pytest.raises(L2LError, match="rank 1 would have no parameters"):
        l2l_compile.pipeline(nn.Linear(4, 4), mesh, stages=[[""]])
    for loops in (0, -1, "1", True):
        with pytest.raises(OptionError, match=f"loops={loops!r}: the number of stages on each rank is an int from 1 to"):
            l2l_compile.pipeline(scored, mesh, torch.ones(4, 4), loops=loops)
    with pytest.raises(
        OptionError, match="loops=3: the model has 4 segments .* at most 2 for each of 2 ranks: give an int from 1 to 2"
    ):
        l2l_compile.pipeline(scored, mesh, torch.ones(4, 4), loops=3)
    with pytest.raises(OptionError, match="loops goes with a batch"):
        l2l_compile.pipeline(scored, mesh, stages=[["layers"]], loops=1)
    l2l_compile.pipeline(scored, mesh, torch.ones(4, 4), loops=2)
    with pytest.raises(L2LError, match="call it once"):
        l2l_compile.pipeline(scored, mesh, torch.ones(4, 4))
    with pytest.raises(L2LError, match=r"ranks 0, 1 of .* are stages of one pipeline"):
        l2l_compile.shard(scored, mesh)
    options = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}
    compiled = torch.compile(scored, backend="l2l", fullgraph=True, options=options)
    with pytest.raises(L2LError, match="the model returns no loss"):
        compiled(torch.ones(4, 4))


def test_what_a_pipeline_cannot_do_is_refused(ranks):
    ranks.run(refused, world=2)


def frozen_stages(rank, world):
    mesh, x = init_device_mesh("cpu", (world,)), torch.ones(4, 4)
    for arguments in ({"batch": x, "loops": 1}, {"stages": [["layers.0", "layers.1"], ["layers.2", "layers.3"]]}):
        model = Scored()
        model.layers[:2].requires_grad_(False)
        with pytest.raises(L2LError, match="rank 0 would have nothing to train: its parameters, from 'layers.0.weight' to"):
            l2l_compile.pipeline(model, mesh, **arguments)
        l2l_compile.pipeline(model.requires_grad_(False), mesh, **arguments)
    options = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}
    with torch.no_grad():
        torch.compile(model, backend="l2l", fullgraph=True, options=options)(x)


def test_a_stage_with_nothing_to_train_is_refused(ranks):
    ranks.run(frozen_stages, world=2)


class Positioned(Scored):
    """A parameter that the model itself owns."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return super().forward(x + self.pos).pow(2).mean()


def a_parameter_of_the_model(rank, world):
    torch.manual_seed(0)
    model, x = Positioned().double(), torch.ones(4, 4, dtype=torch.float64)
    expected = copy.deepcopy(model)
    expected(x).backward()
    stages = [["pos", "layers"], ["layers.2", "layers.3"]]
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), stages=stages)
    options = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}
    torch.compile(model, backend="l2l", fullgraph=True, options=options)(x).backward()
    gradients = {name: p.grad for name, p in expected.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    return [name for name, _ in model.named_parameters() if not name.endswith("bias")]


def test_a_parameter_of_the_model_itself_has_a_stage(ranks):
    first, second = ranks.run(a_parameter_of_the_model, world=2)
    assert first == ["pos", "layers.0.weight", "layers.1.weight"] and second == ["layers.2.weight", "layers.3.weight"]


def another_batch(rank, world):
    case = Case("llama", rows=(6 - rank,) * 4)
    with pytest.raises(L2LError, match="are stages of a pipeline and have batches of 6 and 5 rows"):
        train(case, world, batch=LLAMA.batch(0))
    torch.distributed.barrier()
    model = MODELS["u_shape"]()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), Case("u_shape").batch(0))
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options={"device": "cpu", "block_compiler": "eager"})
    for needs in (True, False):
        with torch.set_grad_enabled(needs), pytest.raises(L2LError, match="have other inputs than each other"):
            compiled(**Case("u_shape").batch(rank))


def test_ranks_with_other_batches_are_refused(ranks):
    ranks.run(another_batch, world=2)


class Scaled(UShape):
    """Takes a number beside its tensors."""

    def forward(self, x, labels, scale):
        return super().forward(x, labels) * scale


def other_inputs(rank, world):
    """Batches that differ in a few columns, and numbers that differ once they are no constants of the graph any more."""
    mesh, options = init_device_mesh("cpu", (world,)), {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}
    batch = {"x": torch.ones(256, 5, 8), "labels": torch.zeros(256, 5, dtype=torch.long)}
    model = Scaled(2)
    l2l_compile.pipeline(model, mesh, {**batch, "scale": 1.0})
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for scale in (1.0, 2.0, 3.0):
        compiled(**batch, scale=scale)
    with pytest.raises(L2LError, match="have other inputs than each other"):
        compiled(**batch, scale=4.0 + rank)
    torch.distributed.barrier()
    labels = batch["labels"].clone()
    labels[1:, 1:] = rank
    with pytest.raises(L2LError, match="have other inputs than each other"):
        compiled(x=batch["x"], labels=labels, scale=2.0)


def test_numbers_and_any_column_of_a_batch_are_compared(ranks):
    ranks.run(other_inputs, world=2)


OTHER_OPTIONS = [
    ("schedule", {"schedule": "1f1b"}, {}, "breadth_first on rank 0, and 1f1b on rank 1"),
    ("delay", {"delay": 1, "schedule": "1f1b"}, {"schedule": "1f1b"}, "0 on rank 0, and 1 on rank 1"),
    ("max_grad_norm", {"max_grad_norm": 1.0}, {"max_grad_norm": 2.0}, "2.0 on rank 0, and 1.0 on rank 1"),
    ("accumulate", {"accumulate": lambda: True}, {}, "1 on rank 0, and a function on rank 1"),
]


def other_options(rank, world):
    for name, theirs, ours, told in OTHER_OPTIONS:
        case = Case("u_shape", options={"update": "in_forward", **(theirs if rank else ours)}, loops=1, steps=1)
        with pytest.raises(RankError, match=f"option '{name}' is {told}: give all ranks the same") as caught:
            train(case, world)
        assert "collectives" not in str(caught.value)
        torch.distributed.barrier()


def test_ranks_with_other_options_are_told_which_option(ranks):
    ranks.run(other_options, world=2)


def other_paths(rank, world, kind):
    """Rank 1 evaluates, or is in another mode, in the second step."""
    torch._dynamo.reset()
    model, case = UShape(), Case("u_shape")
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), case.batch(0), loops=1)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "schedule": "1f1b", "outputs": "loss"}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    compiled(**case.batch(0)).backward()
    if rank == 1 and kind == "mode":
        model.eval()
    with torch.set_grad_enabled(rank == 0 or kind == "mode"), pytest.raises(RankError) as caught:
        compiled(**case.batch(1))
    return str(caught.value).split("\n")


def test_a_rank_that_evaluates_alone_is_named(ranks):
    for text in ranks.run(other_paths, "evaluates", world=2):
        assert text[1:] == [
            "  rank 0: begins forward 2, to train, after 0 optimizer steps",
            "  rank 1: begins forward 2, without gradients, after 0 optimizer steps",
        ]


def test_a_rank_in_another_mode_sees_the_first_difference(ranks):
    for text in ranks.run(other_paths, "mode", world=2):
        assert "collectives part at number 2: rank 0 has 'down.0 on rank 0 trains " in text[-1] and len(text[-1]) < 260
        assert ", and rank 1 'down.0 on rank 0 trains " in text[-1]


def explained(rank, world, schedule):
    model, batch = UShape(), Case("u_shape").batch(0)
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), batch, loops=1)
    options = {"micro_batches": 4, "outputs": "loss", **schedule}
    if schedule.get("delay"):
        options |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "update": "in_forward"}
    (program,) = l2l_compile.explain(model, options)(**batch).programs
    return stage_table(program)[0].split(": ")[1]


def test_explain_says_how_long_ranks_are_idle(ranks):
    own = l2l_compile.Schedule.parse("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3")
    expected = {
        "breadth_first": "20% of a step idle for stages of equal time (4 micro-batches, up to 1 stages a rank)",
        "1f1b": "20% of a step idle for stages of equal time (4 micro-batches, one forward, one back)",
        own: "a schedule of your own (4 micro-batches)",
    }
    for schedule, text in expected.items():
        assert ranks.run(explained, {"schedule": schedule}, world=2)[0] == text
    unflushed = "no rank is idle between steps for stages of equal time (4 micro-batches, one forward, one back, without a flush)"
    assert ranks.run(explained, {"schedule": "1f1b", "delay": 1}, world=2)[0] == unflushed


def other_models(rank, world):
    mesh, batch = init_device_mesh("cpu", (world,)), Case("u_shape").batch(0)

    def staged(**options):
        torch._dynamo.reset()
        model = MODELS["u_shape"]()
        before = torch.optim.SGD(model.parameters(), lr=0.1)
        l2l_compile.pipeline(model, mesh, batch)
        options = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager", **options}
        return model, torch.compile(model, backend="l2l", fullgraph=True, options=options), before

    model, compiled, before = staged()
    with pytest.raises(L2LError, match="parameters that other ranks of a pipeline have"):
        before.step()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith("inside")
    with pytest.raises(RankError, match="(?s)different paths.*inside on rank 0 trains"):
        compiled(**batch)
    model, compiled, _ = staged()
    model.train(rank == 0)
    with pytest.raises(RankError, match="(?s)different paths.* in operations "):
        compiled(**batch)
    with pytest.raises(L2LError, match="divide the same rows into 2 and 3 micro-batches"):
        staged(micro_batches=2 + rank)[1](**batch)


def test_models_that_differ_between_ranks_are_refused(ranks):
    ranks.run(other_models, world=2)


class Counting(nn.Module):
    """A buffer of a module without parameters, which counts batches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.counter = nn.Module()
        self.counter.register_buffer("batches", torch.zeros(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + self.counter.batches)
        self.counter.batches.add_(1)
        return x.pow(2).mean()


def buffers_of_all_ranks(rank, world):
    model = Counting()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), torch.ones(4, 4))
    options = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for _ in range(3):
        compiled(torch.ones(4, 4)).backward()
    return model.counter.batches.tolist()


def test_a_buffer_of_all_ranks_is_written_on_all(ranks):
    assert ranks.run(buffers_of_all_ranks, world=2) == [[3.0], [3.0]]


def a_parameter_of_no_rank(rank, world):
    model = MODELS["llama"]()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), LLAMA.batch(0))
    model.extra = nn.Parameter(torch.ones(()))
    forward = model.forward
    model.forward = lambda **batch: forward(**batch).loss * model.extra
    with pytest.raises(L2LError, match="is on no rank of the pipeline"):
        run(LLAMA, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)


def test_a_parameter_that_no_rank_has_is_refused(ranks):
    ranks.run(a_parameter_of_no_rank, world=2)


# ---- the programs of all ranks ------------------------------------------------------------------------------------------


class LeaveOut:
    """A pass of the user's that takes a message out of the program of one rank."""

    name, requires, provides = "leave_out", frozenset(), frozenset()

    def apply(self, compilation):
        if compilation.stages.rank == 0:
            graph = compilation.backward
            graph.erase_node(graph.find_nodes(op="call_function", target=nodes.send)[0])


def spoiled(rank, world):
    with pytest.raises(VerifyError, match="in backward: message 0 from rank 0 to rank 1 is d hidden") as caught:
        train(Case("llama", options={"passes": [LeaveOut()]}), world)
    assert caught.value.rule == "paired"


def test_a_message_that_is_left_out_is_refused(ranks):
    ranks.run(spoiled, world=2)


def waiting(source: int) -> fx.Graph:
    """A rank that sends what it receives, before it could receive it."""
    graph = fx.Graph()
    got = graph.call_function(nodes.recv, (source,))
    value = graph.call_function(operator.getitem, (got, 0))
    graph.call_function(nodes.send, ((value,), source))
    graph.output(())
    return graph


def test_ranks_that_wait_for_one_another_are_refused():
    with pytest.raises(VerifyError, match="the ranks wait for one another, rank 0 at .*; rank 1 at ") as caught:
        verify_stages._progress("forward", [[(0, node) for node in waiting(other).nodes] for other in (1, 0)])
    assert caught.value.rule == "progress"


def all_programs(rank, world):
    staged = train(Case("u_shape"), world)
    (program,) = l2l_compile.programs(staged.compiled)
    assert str(type(program).parse(str(program))) == str(program)
    return str(program)


def test_a_printed_program_of_a_stage_parses(ranks):
    first, second = ranks.run(all_programs, world=2)
    assert "send(" in first and "recv(1)" in first and "recv(0)" in second
