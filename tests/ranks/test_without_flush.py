"""`schedule="1f1b"` with `delay=1`, PipeDream-2BW: the bits of `delay=1` on one rank, with the pipeline never empty between steps."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
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
from l2l_compile.ranks import watch
from l2l_compile.runtime.executor import HANDLERS
from l2l_compile.runtime.in_flight import InFlight
from l2l_compile.session import session_of
from race_cases import slow_worker
from waits import BY_NAME

UNFLUSHED = {"schedule": "1f1b", "update": "in_forward", "delay": 1}


def without_flush(case: Case) -> Case:
    return replace(case, loops=1, steps=8, options={**case.options, **UNFLUSHED})


def alone(case: Case) -> Case:
    """The oracle: one rank. It goes breadth first, unless a loss in 16 bits or its scale is another then."""
    schedule = "1f1b" if "precision" in case.options else "breadth_first"
    return replace(without_flush(case), options={**case.options, **UNFLUSHED, "schedule": schedule})


def equal_bits(rank, world, *cases):
    for case in cases:
        expected, found = train(alone(case)), train(without_flush(case), world)
        assert found.losses == expected.losses
        for name, weight in found.weights.items():
            assert torch.equal(weight, expected.weights[name]), name


def many(turns: int, **more) -> dict:
    return {"rows": (turns + 1,), "options": {"micro_batches": turns, **more}}


@pytest.mark.parametrize(("world", "turns"), [(2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (3, 6), (4, 4), (4, 5), (4, 8)])
@pytest.mark.slow(but=("2-3", "4-4"))
def test_stages_have_the_bits_of_one_rank(ranks, world, turns):
    cases = [
        Case("llama", **many(turns)),
        Case("u_shape", optimizer="SGD", **many(turns, max_grad_norm=0.1)),
        Case("u_shape", torch.float64, **many(turns)),
    ]
    ranks.run(equal_bits, *cases, world=world, seconds=240)


OPTIONS = {
    "bf16": {"precision": "bf16"},
    "no prefetch": {"prefetch": 0},
    "checks": {"check": True},
    "own step": {"compile_update": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.slow(but="bf16")
def test_options_have_the_bits_of_one_rank(ranks, options):
    ranks.run(equal_bits, Case("llama", options=options), Case("u_shape", options=options), world=2)


@pytest.mark.parametrize("model", ["supervised", "stepped", "mixtral"])
@pytest.mark.slow(but="supervised")
def test_models_have_the_bits_of_one_rank(ranks, model):
    """A loss behind each layer, a value that all turns share and that takes a gradient, experts."""
    ranks.run(equal_bits, Case(model), world=3, seconds=240)


def equal_to_shard(rank, world, kind, *models):
    mesh, width, depth = mesh_of(kind)
    alone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("alone", "copies"))["alone"]
    for model in models:
        case = case_of(mesh.get_local_rank(0), model, loops=1, steps=5, options={**UNFLUSHED, "schedule": "breadth_first"})
        expected = train_sharded(case, mesh, alone, None)
        found = train_sharded(replace(case, options=UNFLUSHED), mesh, width, depth)
        assert found.losses == expected.losses
        for name, weight in found.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-6, atol=1e-6)  # norms are summed in another order


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.slow
def test_stages_that_are_sharded_have_the_numbers_of_shards(ranks, kind):
    ranks.run(equal_to_shard, kind, "llama", "u_shape", world=4, seconds=240)


# ---- a loop of our own ---------------------------------------------------------------------------------------------------


def loop(case: Case, world: int, each: Callable, steps: int = 6):
    """A loop that runs `each(compiled, optimizer, batch, model)` in the place of forward and backward. Returns weights, and the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    if world > 1:
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), case.batch(0), loops=1)
    optimizer = case.optimizer_of(model)
    schedule = {} if world > 1 or "precision" in case.options else {"schedule": "breadth_first"}
    basis = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss"}
    options = {**basis, **UNFLUSHED, **schedule, **case.options, "optimizer": optimizer}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    torch.manual_seed(1)
    results = []
    for step in range(steps):
        results.append(each(compiled, optimizer, case.batch(step), model))
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    return {name: t.detach().clone() for name, t in model.state_dict().items()}, results, compiled


def same_loop(rank, world, name, case, steps=6):
    expected, theirs, _ = loop(case, 1, LOOPS[name], steps)
    found, ours, compiled = loop(case, world, LOOPS[name], steps)
    assert ours == theirs
    for key, weight in found.items():
        assert torch.equal(weight, expected[key]), key
    return session_of(compiled)


def loss_of(compiled, batch) -> torch.Tensor:
    found = compiled(**batch)
    return found if isinstance(found, torch.Tensor) else found.loss


def evaluated(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    with torch.no_grad():
        return loss_of(compiled, batch).item()


def saved_before_backward(compiled, optimizer, batch, model):
    loss = loss_of(compiled, batch)
    model.state_dict()
    loss.backward()


def saved_behind_backward(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    optimizer.state_dict()


def gradient_is_read(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clipped_by_the_loop(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def left_out(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    optimizer.zero_grad()
    loss_of(compiled, batch).backward()


def read_at_once(compiled, optimizer, batch, model):
    loss = loss_of(compiled, batch)
    loss.backward()
    return loss.item()


def without_backward(compiled, optimizer, batch, model):
    loss_of(compiled, batch)
    loss_of(compiled, batch).backward()


def halved(compiled, optimizer, batch, model):
    (loss_of(compiled, batch) / 2).backward()


def twice(compiled, optimizer, batch, model):
    for _ in range(2):
        (loss_of(compiled, batch) * 0.5).backward()


def written(compiled, optimizer, batch, model):
    loss_of(compiled, batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)


LOOPS = {f.__name__: f for f in (evaluated, saved_before_backward, saved_behind_backward, gradient_is_read, clipped_by_the_loop)}
LOOPS |= {f.__name__: f for f in (left_out, read_at_once, without_backward, halved, twice)}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow(but=("evaluated", "clipped_by_the_loop", "twice", "without_backward"))
def test_a_loop_has_the_numbers_of_one_rank(ranks, name):
    case = Case("u_shape", options={"accumulate": 2} if name == "twice" else {})
    ranks.run(same_loop, name, case, world=3, seconds=240)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", lengths=(7, 9, 7, 5)),
        Case("llama", rows=(6, 6, 2, 6, 1, 5)),
        Case("llama", rows=(6, 3, 7, 6)),
    ],
    ids=["lengths", "fewer micro-batches", "rows"],
)
def test_sizes_may_change(ranks, case):
    ranks.run(equal_bits, case, world=3, seconds=240)


# ---- the rule ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers whose loss is a sum over rows, so that micro-batches add up without a factor."""

    def __init__(self, depth: int = 4, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().sum()


def two_copies(turns: int, kind: str, steps: int, overflow: int, max_norm: float | None) -> dict[str, torch.Tensor]:
    """The rule, with plain PyTorch: a step computes at the weights of the step before, and its update goes to the newest ones."""
    torch.manual_seed(0)
    newest = Net()
    read = copy.deepcopy(newest)
    optimizer = _optimizer(kind, newest)
    for step in range(steps):
        before = copy.deepcopy(newest)
        for x, y in zip(*(t.tensor_split(turns) for t in _batch(step, overflow)), strict=True):
            read(x, y).backward()
        for mine, theirs in zip(newest.parameters(), read.parameters(), strict=True):
            mine.grad = theirs.grad
        norm = torch.nn.utils.get_total_norm([p.grad for p in newest.parameters()])
        if torch.isfinite(norm):
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(newest.parameters(), max_norm)
            optimizer.step()
        optimizer.zero_grad()
        read = before
    return {name: t.detach() for name, t in newest.state_dict().items()}


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **more)


def _batch(step: int, overflow: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randn(9, 8, generator=made) for _ in range(2))
    return (x * float("inf") if step == overflow else x), y


def is_the_rule(rank, world, turns, kind, overflow, max_norm, steps=8):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), _batch(0, -1), loops=1)
    optimizer = _optimizer(kind, model)
    options = {"device": "cpu", "micro_batches": turns, "block_compiler": "eager", "optimizer": optimizer, **UNFLUSHED}
    options |= {"compile_update": False} | ({} if max_norm is None else {"max_grad_norm": max_norm})
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")  # a step is skipped
        for step in range(steps):
            compiled(*_batch(step, overflow)).backward()
            optimizer.step()
            optimizer.zero_grad()
        l2l_compile.synchronize(compiled)
    expected = two_copies(turns, kind, steps, overflow, max_norm)
    found = {name: t for name, t in model.state_dict().items() if t.numel()}
    assert found and all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("overflow", "max_norm"), [(-1, None), (3, 0.5)], ids=["plain", "clipped, overflow"])
@pytest.mark.slow(but="*overflow-SGD")
def test_weights_are_those_of_a_loop_with_two_copies(ranks, kind, overflow, max_norm):
    for world, turns in ((2, 3), (3, 3), (4, 4)):
        ranks.run(is_the_rule, turns, kind, overflow, max_norm, world=world)


class Counted(contextlib.ExitStack):
    """Counts weights of a segment on the device, and turns between the first segment of a stage forward and back."""

    def __init__(self):
        super().__init__()
        self.weights, self.flight = Counter(), 0
        self.most_weights = self.most_in_flight = 0

    def __enter__(self):
        patch = self.enter_context(pytest.MonkeyPatch.context())
        for target, noted in ((nodes.fetch_resident, self.fetched), (nodes.release, self.released)):
            patch.setitem(HANDLERS, target, self.around(HANDLERS[target], noted))
        for target, change in ((nodes.forward, 1), (nodes.backward, -1)):
            patch.setitem(
                HANDLERS, target, self.around(HANDLERS[target], lambda run, node, change=change: self.ran(node, change))
            )
        return self

    @staticmethod
    def around(handler, noted):
        def run(executor, node, *operands):
            noted(executor, node)
            return handler(executor, node, *operands)

        return run

    def fetched(self, run, node):
        self.weights[nodes.operands(node).segment] += 1
        self.most_weights = max(self.most_weights, *self.weights.values())

    def released(self, run, node):
        fetch = nodes.operands(node).x
        if fetch.target is nodes.fetch_resident:
            self.weights[nodes.operands(fetch).segment] -= 1

    def ran(self, node, change):
        graph = node.graph
        runs = (n for n in graph.nodes if nodes.runs_segment(n) and nodes.operands(n).turn is not None)
        if nodes.operands(node).turn is not None and nodes.operands(node).segment == nodes.operands(next(runs)).segment:
            self.flight += change
            self.most_in_flight = max(self.most_in_flight, self.flight)


def counted(rank, world, turns):
    with Counted() as found:
        train(without_flush(Case("llama", **many(turns))), world)
    return found.most_weights, found.most_in_flight


@pytest.mark.parametrize(("world", "turns"), [(2, 4), (3, 3), (4, 8)])
@pytest.mark.slow(but="3-3")
def test_two_versions_and_few_turns_are_on_the_device(ranks, world, turns):
    found = ranks.run(counted, turns, world=world)
    assert [flight for _, flight in found] == [world - rank for rank in range(world)]
    assert [versions for versions, _ in found] == [2] * (world - 1) + [1]


def drains(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        count, drain = itertools.count(), InFlight.drain
        patch.setattr(InFlight, "drain", lambda self, *kind: (self.paused is None or next(count), drain(self, *kind))[1])
        trained = train(without_flush(Case("llama")), world)
    return next(count), session_of(trained.compiled).in_flight.paused is None


def test_steps_do_not_empty_the_pipeline(ranks):
    """It is emptied once, where the loop of the test calls `synchronize`."""
    assert ranks.run(drains, world=3) == [(1, True)] * 3


def two_models(rank, world):
    """Two models over one mesh, whose norms are clipped: the first takes two steps, the second one."""

    def trained(world):
        torch._dynamo.reset()
        torch.manual_seed(0)
        models, made = [Net(), Net(depth=5)], []
        for model in models:
            if world > 1:
                l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), _batch(0, -1), loops=1)
            optimizer = _optimizer("SGD", model)
            options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "max_grad_norm": 0.5, **UNFLUSHED}
            options |= {"optimizer": optimizer} | ({} if world > 1 else {"schedule": "breadth_first"})
            made.append((torch.compile(model, backend="l2l", fullgraph=True, options=options), optimizer))
        for step in range(9):
            compiled, optimizer = made[step % 3 == 2]
            compiled(*_batch(step, -1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model.state_dict() for model in models]

    for mine, expected in zip(trained(world), trained(1), strict=True):
        assert mine and all(torch.equal(weight, expected[name]) for name, weight in mine.items())


def test_two_models_over_one_mesh_have_the_bits_of_one_rank(ranks):
    ranks.run(two_models, world=3)


def ends_with_its_group(rank, world):
    """`destroy_process_group` is called with turns in flight."""

    def each(compiled, optimizer, batch, model):
        compiled(**batch).backward()

    expected, _, _ = loop(Case("u_shape"), 1, each)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = UShape()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), Case("u_shape").batch(0), loops=1)
    optimizer = Case("u_shape").optimizer_of(model)
    options = {
        "device": "cpu",
        "micro_batches": 3,
        "block_compiler": "eager",
        "outputs": "loss",
        **UNFLUSHED,
        "optimizer": optimizer,
    }
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    torch.manual_seed(1)
    for step in range(6):
        each(compiled, optimizer, Case("u_shape").batch(step), model)
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group(torch.distributed.new_group())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    return len(model.state_dict())


def test_a_group_that_ends_gets_the_last_update_first(ranks):
    assert sum(ranks.run(ends_with_its_group, world=2)) == len(UShape().state_dict())


# ---- losses --------------------------------------------------------------------------------------------------------------


def late_losses(rank, world):
    def kept(compiled, optimizer, batch, model):
        loss = compiled(**batch)
        loss.backward()
        return loss.detach()

    _, losses, _ = loop(Case("u_shape"), world, kept)
    there = [type(loss) is torch.Tensor for loss in losses]
    return there[0], torch.stack(losses).tolist(), float(losses[-1]), f"{losses[0]:.3f}", copy.deepcopy(losses[0]).item()


def test_losses_of_the_last_stage_are_read_everywhere(ranks):
    found = ranks.run(late_losses, world=2)
    assert [is_there for is_there, *_ in found] == [False, True]
    assert found[0][1:] == found[1][1:]


def warned(rank, world, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(Case("u_shape"), world, LOOPS[name])
    return [str(w.message) for w in caught if "was read 3 times" in str(w.message)]


def test_a_loop_that_reads_each_loss_at_once_is_told(ranks):
    first, last = ranks.run(warned, "read_at_once", world=2)
    assert len(first) == 1 and "Read the loss of the step before" in first[0] and not last


def test_a_loop_that_divides_each_loss_does_not_wait(ranks):
    assert ranks.run(warned, "halved", world=2) == [[], []]


# ---- schedules of one's own ----------------------------------------------------------------------------------------------

GPIPE = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2"
EAGER = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
HELD_BACK = "0F0,0B1@-1,0F1,0B2@-1,0F2,0B0\n1F0,1B2@-1,1F1,1B0,1F2,1B1"  # each rank leaves one turn more in flight than 2BW


@pytest.mark.parametrize("text", [GPIPE, EAGER, HELD_BACK], ids=["gpipe", "eager", "held back"])
def test_a_schedule_of_ones_own_has_the_bits_of_one_rank(ranks, text):
    ranks.run(own_schedule, text, world=2)


def own_schedule(rank, world, text):
    schedule, case = l2l_compile.Schedule.parse(text), Case("u_shape")
    expected = train(alone(case))
    case = without_flush(case)
    found = train(replace(case, options={**case.options, "schedule": schedule}), world)
    assert found.losses == expected.losses
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected.weights[name]), name
    (program,) = l2l_compile.programs(found.compiled)
    begins = [nodes.operands(n).turn for n in program.step.graph.find_nodes(op="call_function", target=nodes.begin)]
    here, later = schedule.apart(rank)
    assert program.schedule == schedule and [b for b in begins if b[0].isdigit()] == [*map(str, here), *map(str, later)]


def too_few(rank, world):
    with pytest.raises(l2l_compile.L2LError, match="2 for 3 ranks: set micro_batches to 3 at least"):
        train(without_flush(Case("u_shape", options={"micro_batches": 2})), world)


def test_fewer_micro_batches_than_ranks_are_refused(ranks):
    ranks.run(too_few, world=3)


def other_sizes(rank, world, options, match):
    with pytest.raises(l2l_compile.L2LError, match=match):
        train(Case("u_shape", loops=1, options={"schedule": l2l_compile.Schedule.parse(EAGER), **options}, rows=(2,)), world)


def test_a_schedule_for_other_sizes_is_refused(ranks):
    ranks.run(other_sizes, {}, "is for 3 micro-batches, and this batch has 2", world=2)
    ranks.run(other_sizes, {}, "is for 2 ranks, and 3 run this model", world=3)


# ---- what is refused -----------------------------------------------------------------------------------------------------


def drained_alone(rank, world, begins):
    def each(compiled, optimizer, batch, model):
        compiled(**batch).backward()
        if rank == 0:
            begins(compiled, batch, model)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(l2l_compile.RankError) as caught:
        patch.setattr(watch, "PATIENCE", 2.0)
        loop(Case("u_shape"), world, each)
    return str(caught.value)


def saves(compiled, batch, model):
    model.state_dict()


def evaluates(compiled, batch, model):
    with torch.no_grad():
        compiled(**batch)


def changes_mode(compiled, batch, model):
    model.eval()
    compiled(**batch)


@pytest.mark.parametrize(
    ("begins", "why"),
    [
        (saves, " (state_dict(), l2l_compile.synchronize, p.grad), after"),
        (evaluates, ", before a forward without gradients, after"),
        (changes_mode, ", before another program (a new length, model.eval()) or number of micro-batches, after"),
    ],
)
def test_a_rank_that_drains_alone_is_named(ranks, begins, why):
    for text in ranks.run(drained_alone, begins, world=2):
        _, *lines = text.split("\n")
        assert len(lines) == 2 and "rank 1: begins forward 2, to train" in lines[1]
        assert f"rank 0: goes back with what forward 1 has left in flight{why}" in lines[0]


def other_batch(rank, world):
    def each(compiled, optimizer, batch, model):
        batch["x"] += rank
        compiled(**batch).backward()

    with pytest.raises(l2l_compile.L2LError) as caught:
        loop(Case("u_shape"), world, each)
    return str(caught.value)


def test_ranks_with_other_batches_are_named(ranks):
    for text in ranks.run(other_batch, world=2):
        assert "ranks 0 and 1 are stages of a pipeline and have other inputs than each other" in text


def in_no_optimizer(rank, world):
    torch._dynamo.reset()
    model = UShape()
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), Case("u_shape").batch(0), loops=1)
    optimizer = torch.optim.AdamW(list(model.parameters())[1:])
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "optimizer": optimizer, **UNFLUSHED}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    with pytest.raises(l2l_compile.L2LError, match="optimizer lacks parameters that take a gradient"):
        compiled(**Case("u_shape").batch(0))


def test_parameters_of_no_optimizer_are_refused(ranks):
    ranks.run(in_no_optimizer, world=2)


# ---- waits ---------------------------------------------------------------------------------------------------------------


def slow(rank, world, name, lane):
    """Whether the weights differ without a wait, if a lane of the host pauses."""

    def each(compiled, optimizer, batch, model):
        compiled(**batch).backward()
        if not paused:
            paused.append(slow_worker(session_of(compiled), lane, 0.02))

    found = []
    for without in (contextlib.nullcontext(), BY_NAME[name].deleted()):
        paused = []
        with without:
            try:
                found.append(loop(Case("u_shape", options={"schedule": "1f1b"}), world, each)[0])
            except (l2l_compile.L2LError, RuntimeError, KeyError, AssertionError):
                found.append({})
    return found[0].keys() != found[1].keys() or any(not torch.equal(t, found[1][name]) for name, t in found[0].items())


def test_an_update_behind_gradients_in_flight_waits_for_them(ranks):
    name = "host.updates.without_flush.UpdatesWithoutFlush._look_behind: collected.wait()"
    assert any(ranks.run(slow, name, "host", world=2))


def test_a_step_waits_for_the_updates_before():
    assert slow(0, 1, "host.updates.without_flush.UpdatesWithoutFlush._drain: super()._drain()", "update")


def peaks(rank, world):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Net(width=128), torch.randn(2, 6, 128)  # weights of whole cache lines, as they lie on a wire
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), tuple(batch), loops=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "optimizer": optimizer, **UNFLUSHED}
    expected = l2l_compile.explain(model, options)(*batch).device_memory.peak
    compiled, found = torch.compile(model, backend="l2l", fullgraph=True, options=options), []
    for _ in range(4):
        compiled(*batch).backward()
        optimizer.step()
        found.append(l2l_compile.stats(compiled).peak_device_bytes)
    l2l_compile.synchronize(compiled)
    return expected, found


def test_the_peak_is_the_expected_one(ranks):
    for expected, found in ranks.run(peaks, world=3):
        assert found[0] <= expected and found[2:] == [expected] * 2  # the first two read one version of the weights
