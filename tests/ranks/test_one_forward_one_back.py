"""`schedule="1f1b"`: the bits of one rank that runs breadth first, with at most d - r turns in flight on rank r of d."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from pipelines import MODELS, Case, UShape, train
from test_pipeline_width import case_of, mesh_of
from test_pipeline_width import train as train_sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.passes.verify import verify
from l2l_compile.session import session_of
from models import compilation
from race_cases import slow_worker
from waits import BY_NAME

BY_TURNS = {"schedule": "1f1b"}


def by_turns(case: Case) -> Case:
    return replace(case, options={**case.options, **BY_TURNS})


def equal_bits(rank, world, *cases):
    for case in cases:
        rounds = "precision" in case.options  # turns take a loss apart into terms, which rounds otherwise in 16 bits
        alone, staged = train(by_turns(case) if rounds else case), train(by_turns(case), world)
        assert staged.losses == alone.losses
        for name, weight in staged.weights.items():
            assert torch.equal(weight, alone.weights[name]), name
        for name, gradient in staged.gradients.items():
            assert torch.equal(gradient, alone.gradients[name]), name
        assert any(program.step is not None for program in l2l_compile.programs(staged.compiled))


def test_one_rank_has_the_bits_of_breadth_first():
    one = [Case("u_shape"), Case("llama", torch.float64), Case("stepped"), Case("mixtral"), Case("gpt2"), Case("bert")]
    equal_bits(0, 1, *one, Case("supervised"))


OPTIONS = {
    "at_step": {},
    "in_forward": {"update": "in_forward"},
    "delay": {"update": "in_forward", "delay": 1},
    "clipped": {"update": "in_forward", "max_grad_norm": 0.1},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16 in forward": {"precision": "fp16", "update": "in_forward"},
    "no prefetch": {"prefetch": 0},
    "checks": {"check": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_have_the_bits_of_one_rank(ranks, options):
    ranks.run(equal_bits, Case("llama", loops=1, options=options), Case("u_shape", loops=1, options=options), world=2)


class Mean(nn.Module):
    def forward(self, x):
        return x.pow(2).mean()


@pytest.mark.parametrize(("world", "turns"), [(2, 2), (2, 8), (3, 3), (3, 6), (4, 4), (4, 16)])
@pytest.mark.slow(but="2-2")
def test_stages_have_the_bits_of_one_rank(ranks, world, turns):
    many, options = {"rows": (turns + 1,) * 4, "loops": 1}, {"micro_batches": turns}
    cases = [
        Case(model, dtype, options=options, **many) for model, dtype in (("u_shape", torch.float32), ("llama", torch.float64))
    ]
    ranks.run(equal_bits, *cases, world=world, seconds=240)


def test_a_loss_on_each_stage_has_the_bits_of_one_rank(ranks):
    ranks.run(equal_bits, Case("supervised", loops=1), Case("supervised", loops=1, options={"update": "in_forward"}), world=2)


def test_clipping_in_the_loop_has_the_bits_of_one_rank(ranks):
    ranks.run(equal_bits, Case("llama", loops=1, max_norm=0.1), Case("u_shape", loops=1, max_norm=0.01), world=2)


def test_compiled_blocks_have_the_bits_of_one_rank(ranks):
    ranks.run(equal_bits, Case("llama", loops=1, options={"block_compiler": "inductor"}), world=2)


def test_rows_and_lengths_may_change(ranks):
    """As few rows as one, for which there is one micro-batch: a step of it needs no turns."""
    ranks.run(
        equal_bits, Case("llama", loops=1, rows=(6, 4, 2, 1), lengths=(5, 9, 7, 5)), Case("u_shape", loops=1, rows=(6, 4, 1, 5))
    )


def in_flight(rank, world, turns):
    """How many turns wait at most between the first segment of a stage forward, and back."""
    case = by_turns(Case("llama", loops=1, options={"micro_batches": turns}, rows=(turns,) * 4))
    (program,) = l2l_compile.programs(train(case, world).compiled)
    runs = [n for n in program.step.graph.nodes if nodes.runs_segment(n) and nodes.operands(n).turn is not None]
    first = [n for n in runs if nodes.operands(n).segment == nodes.operands(runs[0]).segment]
    return max(itertools.accumulate(1 if n.target is nodes.forward else -1 for n in first))


@pytest.mark.parametrize(("world", "turns"), [(2, 4), (3, 6)])
def test_few_turns_are_in_flight(ranks, world, turns):
    assert ranks.run(in_flight, turns, world=world) == [world - rank for rank in range(world)]


def of_turn(graph, turn):
    return next(n for n in graph.find_nodes(op="call_function", target=nodes.forward) if nodes.operands(n).turn == turn)


def begin_of(graph, name):
    return next(n for n in graph.find_nodes(op="call_function", target=nodes.begin) if nodes.operands(n).turn == name)


BROKEN = {
    "no part": lambda graph: graph.erase_node(begin_of(graph, "0F1")),
    "other part": lambda graph: nodes.set_operands(begin_of(graph, "0F1"), turn="0F2"),
    "in another part": lambda graph: begin_of(graph, "0B0").prepend(begin_of(graph, "0F1")),
    "twice": lambda graph: nodes.set_operands(of_turn(graph, 1), turn=0),
    "another": lambda graph: of_turn(graph, 1).all_input_nodes[-1].meta.update(turn=2),
    "too early": lambda graph: of_turn(graph, 0).prepend(
        next(n for n in graph.find_nodes(op="call_function", target=nodes.backward) if nodes.operands(n).turn == 0)
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_turns_that_are_not_in_order_are_refused(broken):
    found = compilation(nn.Sequential(nn.Linear(4, 4), Mean()), torch.ones(6, 4), **BY_TURNS, micro_batches=3, outputs="loss")
    assert found.step is not None
    BROKEN[broken](found.step)
    with pytest.raises(l2l_compile.VerifyError) as caught:
        verify(found, frozenset())
    assert caught.value.rule == "turns"


def test_an_input_that_takes_a_gradient_is_refused():
    with pytest.raises(l2l_compile.L2LError, match="input 'x' takes a gradient, .* detach it, or use schedule"):
        rows = torch.ones(6, 4, requires_grad=True)
        compilation(Mean(), rows, **BY_TURNS, micro_batches=3, outputs="loss")


def equal_to_shard(rank, world, kind, *cases):
    mesh, width, depth = mesh_of(kind)
    alone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("alone", "copies"))["alone"]
    for arguments, more in cases:
        case = case_of(mesh.get_local_rank(0), *arguments, loops=1, **more)
        expected = train_sharded(case, mesh, alone, None)
        for found in train_sharded(by_turns(case), mesh, alone, None), train_sharded(by_turns(case), mesh, width, depth):
            assert found.losses == expected.losses
            for made, wanted in ((found.gradients, expected.gradients), (found.weights, expected.weights)):
                for name, tensor in made.items():
                    assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.slow(only="replicas")
def test_stages_that_are_sharded_have_the_bits_of_shards(ranks, kind):
    in_forward = {"options": {"update": "in_forward"}}
    ranks.run(equal_to_shard, kind, (("llama",), {}), (("u_shape", torch.float64), in_forward), world=4, seconds=240)


# ---- the loop ------------------------------------------------------------------------------------------------------------


def trained(options, loss_of, *calls, rows=6):
    """The parameters after a few steps of a loop in one process."""
    case = Case("u_shape", options=options, rows=(rows,) * 4)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = UShape()
    optimizer = case.optimizer_of(model)
    more = {"optimizer": optimizer} if "update" in options else {}
    everything = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", **options, **more}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=everything)
    for step in range(3):
        loss_of(compiled, case.batch(step))
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    return [p.detach().clone() for p in model.parameters()], compiled


def assert_same_loop(loss_of, **options):
    expected, _ = trained(options, loss_of)
    found, compiled = trained({**options, **BY_TURNS}, loss_of)
    assert all(map(torch.equal, found, expected))
    return compiled


@pytest.mark.parametrize("options", [{}, {"update": "in_forward"}], ids=str)
def test_a_loss_times_a_power_of_two_has_the_same_bits(options):
    assert_same_loop(lambda model, batch: (model(**batch) / 4).backward(), **options)


@pytest.mark.parametrize("options", [{}, {"update": "in_forward", "accumulate": 2}], ids=str)
def test_several_backwards_are_one_step(options):
    def losses(model, batch):
        for _ in range(2):
            (model(**batch) / 2).backward()

    assert_same_loop(losses, **options)


def test_a_forward_without_backward_leaves_nothing():
    def losses(model, batch):
        model(**batch)
        model(**batch).backward()

    compiled = assert_same_loop(losses)
    assert session_of(compiled).device.ledger.held == 0


def test_a_second_backward_is_refused():
    def twice(model, batch):
        loss = model(**batch)
        loss.backward(retain_graph=True)
        with pytest.raises(l2l_compile.L2LError, match="breadth_first"):
            loss.backward()

    trained(BY_TURNS, twice)


def test_an_evaluation_between_steps_runs_breadth_first():
    def both(model, batch):
        with torch.no_grad():
            model(**batch)
        model(**batch).backward()

    assert_same_loop(both)


def after_an_overflow(pause):
    """The factors on the losses of some steps, all of which overflow; work of the host pauses for so many seconds."""
    options = {"precision": "fp16", "update": "in_forward", **BY_TURNS}
    case = Case("u_shape")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = UShape()
    optimizer = case.optimizer_of(model)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "optimizer": optimizer, **options}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    used = []
    for step in range(4):
        loss = compiled(**case.batch(step))
        used.append(loss.grad_fn.step.scale)
        loss.backward()
        if step == 0:
            session_of(compiled).server.updates.scale.value = 2.0**40
            slow_worker(session_of(compiled), "host", pause)
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    return used


def test_a_step_scales_its_loss_behind_the_step_before():
    expected = after_an_overflow(0.0)
    assert after_an_overflow(0.1) == expected and len(set(expected)) == 4
    with BY_NAME["host.updates.interface.Updates.next_scale: self.synchronize()"].deleted():
        assert after_an_overflow(0.1) != expected


@pytest.mark.parametrize("model", ["u_shape", "llama", "stepped"])
def test_the_peak_is_the_expected_one(model):
    case, options = Case(model), {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", **BY_TURNS}
    torch.manual_seed(0)
    report = l2l_compile.explain(MODELS[model](), options)(**case.batch(0))
    assert report.host_memory.stashes == 0
    assert report.device_memory.peak == l2l_compile.stats(train(by_turns(case)).compiled).peak_device_bytes


def test_a_printed_step_is_read_back():
    (program,) = l2l_compile.programs(train(by_turns(Case("llama"))).compiled)
    text = str(program)
    assert str(Program.parse(text)) == text
    assert "turn=2)" in text and "turn 2" in text and "forward:" not in text


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "1GB"}, "keep"),
        ({"batch_scope": "global"}, "batch_scope"),
        ({"update": "in_backward"}, "in_backward"),
        ({"schedule": "gpipe"}, "breadth_first"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_turns_are_refused(options, match):
    with pytest.raises(l2l_compile.OptionError, match=match):
        torch.compile(torch.nn.Linear(2, 2), backend="l2l", options={**BY_TURNS, **options})(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        ("gated", {}, "norms.0.*of all rows.*breadth_first"),
        ("t5", {}, "takes a gradient.*breadth_first"),
        ("llama", {"outputs": "all"}, "outputs='loss'"),
    ],
)
def test_what_cannot_go_by_turns_is_refused_by_name(model, options, match):
    case = by_turns(Case(model, options=options))
    with pytest.raises(l2l_compile.L2LError, match=match):
        train(case)


def several_stages(rank, world):
    shared = "segments 'transformer' and '.*lm_head' share 'transformer.wte.weight'.*untie them.*breadth_first"
    with pytest.raises(l2l_compile.L2LError, match=shared):
        train(by_turns(Case("gpt2", loops=1)), world)
    with pytest.raises(l2l_compile.L2LError, match="rank 0 has 3, which begin with .*loops=1.*breadth_first") as caught:
        train(by_turns(Case("llama")), world)
    assert "share" not in str(caught.value)


def test_several_stages_of_a_rank_are_refused_with_the_cause(ranks):
    ranks.run(several_stages)


class Skipping(nn.Module):
    """Layers, of which a batch without rows of ones skips the last or, of a model in another order, the first that is defined."""

    def __init__(self, backward: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.order = range(4, -1, -1) if backward else range(5)

    def forward(self, x, skip):
        for number in self.order:
            if number != skip:
                x = torch.tanh(self.layers[number](x))
        return x.pow(2).mean()


def a_layer_that_the_batch_skips(rank, world):
    for backward in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Skipping(backward), torch.ones(6, 4)
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), {"x": x, "skip": 0 if backward else 4}, loops=1)
        options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", **BY_TURNS}
        compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
        if backward:
            unread = "segment 'layers.0' is apart on rank 0: the batch that l2l_compile.pipeline got did not read"
            with pytest.raises(l2l_compile.L2LError, match=unread):
                compiled(x, None)
        else:
            compiled(x, None).backward()
            assert all(p.grad is not None for p in model.parameters())


def test_a_layer_that_the_batch_of_pipeline_skips_is_named(ranks):
    ranks.run(a_layer_that_the_batch_skips)
