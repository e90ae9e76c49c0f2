"""A step in virtual time moves and holds what a real one does, on any machine, and leaves the model alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import l2l_compile
from l2l_compile import Machine, OptionError, simulate
from l2l_compile.devices.staging import Staging
from l2l_compile.simulation import simulated_loop
from l2l_compile.simulation.block_times import MeasuredTimes
from l2l_compile.simulation.simulated_device import SimulatedStaging
from l2l_compile.testing.strict_device import _Thread
from models import WIDTH, Shared, Stack, TwoHeads, UNet, loss_of, rows

MACHINE = Machine(
    "a machine",
    flops={"float32": 1e9, "float64": 1e9, "bfloat16": 4e9},
    memory_bandwidth=1e9,
    device_memory=1e9,
    h2d=1e8,
    d2h=1e8,
    pageable=1e8,
    host_bandwidth=1e9,
    host_memory=1e9,
)
MODELS = {
    "stack": lambda: Stack(4),
    "skips": lambda: nn.Sequential(nn.Linear(5, WIDTH), UNet(4)),
    "shared, several outputs": lambda: nn.Sequential(Shared(), nn.Linear(WIDTH, 5), TwoHeads()),
}
OPTIONS = [{}, {"prefetch": 0}, {"stash": "device", "prefetch": 2}, {"precision": "bf16"}]
MOVED = ("fetched_bytes", "pushed_bytes", "offloaded_bytes", "restored_bytes", "peak_device_bytes")


@pytest.fixture
def in_order(threaded, monkeypatch):
    """A device with memory of its own, on which each piece of work is done before the next is given to any lane."""

    def run(lane, work):
        lane._queue.work.put(work)
        lane.synchronize()

    monkeypatch.setattr(_Thread, "run", run)
    threaded.delay = 0.0


def real_step(model, x, options):
    step = torch.compile(model, backend="l2l", options={"block_compiler": "eager", **options})
    for _ in range(2):
        loss_of(step(x)).backward()
    return l2l_compile.stats(step)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(but=("stack-*", "skips-{}", "shared, several outputs-{'precision': 'bf16'}"))
def test_bytes_are_those_of_a_real_step(in_order, name, options):
    """Moved, and held at the peak: to the byte."""
    options = {"micro_batches": 3, **options}
    model, x = MODELS[name](), rows(6, dtype=torch.float32)
    real = real_step(model, x, options)
    found = simulate(copy.deepcopy(model), MACHINE, {"block_compiler": "eager", **options}, loss=loss_of)(x)
    assert {n: getattr(found.stats, n) for n in MOVED} == {n: getattr(real, n) for n in MOVED}


def held(model):
    """All tensors of a model by name, with where they are."""
    return {name: (id(t), t.data_ptr(), type(t)) for name, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
def test_the_model_and_the_optimizer_stay_as_they_are(update):
    model, x = Stack(3), rows(6, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    before, values = held(model), copy.deepcopy(model.state_dict())
    found = simulate(model, MACHINE, {"micro_batches": 2, "optimizer": optimizer, "update": update})(x)
    assert found.seconds > 0
    assert held(model) == before and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not optimizer.state and not any(isinstance(p, FakeTensor) for p in optimizer.param_groups[0]["params"])
    hooks = (optimizer._optimizer_step_pre_hooks, *(m._state_dict_pre_hooks for m in model.modules()))
    assert not any(hooks)
    step = torch.compile(model, backend="l2l", options={"optimizer": optimizer, "update": update, "block_compiler": "eager"})
    loss_of(step(x)).backward()  # and the model trains afterwards
    optimizer.step()
    l2l_compile.synchronize(step)
    assert any(not torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_an_optimizer_that_has_state_keeps_it():
    model, x = Stack(2), rows(4, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    simulate(model, MACHINE, {"optimizer": optimizer, "update": "in_backward"})(x)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_a_model_on_meta_takes_as_long_as_a_real_one():
    with torch.device("meta"):
        model, x = Stack(3).float(), torch.empty(6, 5)
    options = {"micro_batches": 3, "precision": "bf16"}
    assert simulate(model, MACHINE, options)(x) == simulate(Stack(3).float(), MACHINE, options)(torch.randn(6, 5))


def test_an_optimizer_that_is_not_compiled_takes_longer():
    """Its operations pass over memory one by one."""
    model, x = Stack(3), rows(6, dtype=torch.float32)
    taken = []
    for compile_update in (True, False):
        options = {"optimizer": torch.optim.AdamW(model.parameters()), "update": "in_backward", "compile_update": compile_update}
        taken.append(simulate(model, MACHINE, options)(x).timeline.busy("host"))
    assert taken[0] < taken[1]


def test_where_the_host_is_the_device_nothing_overlaps():
    model, x = Stack(3), rows(6, dtype=torch.float32)
    found = simulate(model, dataclasses.replace(MACHINE, overlaps=False), {"micro_batches": 3})(x)
    assert {span.lane for span in found.timeline.spans} <= {"caller", "host"}
    assert found.timeline.busy("caller") <= found.seconds


def test_spans_of_a_lane_are_in_order_and_gaps_have_causes():
    model, x = Stack(6), rows(12, dtype=torch.float32)
    found = simulate(model, dataclasses.replace(MACHINE, h2d=1e6), {"micro_batches": 3, "precision": "bf16"})(x)
    for lane in ("compute", "h2d", "d2h", "caller"):
        spans = found.timeline.of(lane)
        assert spans and all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
        assert all(gap.waited_for for gap in found.gaps(lane))
    assert any("fetch_weights" in gap.waited_for for gap in found.gaps("compute"))  # the link is slow


def test_a_simulation_is_saved_as_a_chrome_trace(tmp_path):
    found = simulate(Stack(3), MACHINE, {"micro_batches": 3})(rows(6, dtype=torch.float32))
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seconds = dict.fromkeys(threads.values(), 0.0)
    for span in spans:
        seconds[threads[span["tid"]]] += span["dur"] / 1e6
    for lane in ("compute", "h2d", "d2h"):
        assert seconds[lane] == pytest.approx(found.timeline.busy(lane))
    assert any(span["name"].startswith("backward layers.") for span in spans)


def test_a_machine_without_a_figure_for_a_dtype_is_named():
    machine = dataclasses.replace(MACHINE, flops={"bfloat16": 1e9})
    with pytest.raises(OptionError, match=r"'a machine' has no figure for FLOP/s in float32; it has bfloat16"):
        simulate(Stack(2), machine, {})(rows(4, dtype=torch.float32))


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.slow
def test_measured_blocks_take_the_time_of_their_code(monkeypatch, block_compiler):
    """Each block is run once for a size. Here it counts as a second; the rest of a step is computed from the machine's figures."""
    asked = []

    def seconds(self, request):
        asked.append(original(self, request))
        return 1.0

    original = MeasuredTimes.seconds
    monkeypatch.setattr(MeasuredTimes, "seconds", seconds)
    machine = dataclasses.replace(MACHINE, overlaps=False)
    model, x = nn.Sequential(nn.Embedding(7, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), torch.arange(6)
    options = {"micro_batches": 3, "block_compiler": block_compiler}
    found = simulate(model, machine, options, blocks="measured")(x)
    calls = 2 * 3 * 4  # forward and backward, micro-batches, segments
    assert calls <= found.timeline.busy("caller") < calls + 0.1
    assert len(asked) == 4 and all(0 < seconds < 1 for seconds in asked)  # two blocks


def test_blocks_are_measured_on_the_host_alone():
    with pytest.raises(OptionError, match=r"blocks='measured' runs blocks on this host, but layers of machine 'a machine' run"):
        simulate(Stack(2), MACHINE, {}, blocks="measured")
    with pytest.raises(OptionError, match=r"blocks is 'roofline' or 'measured', not 'guessed'"):
        simulate(Stack(2), MACHINE, {}, blocks="guessed")


@pytest.mark.parametrize("pinned_memory", [None, "1MiB"])
def test_copies_through_the_ring_take_as_long_as_part_by_part(monkeypatch, pinned_memory):
    """Weights without a wire, gradients and inputs go through it; the real ring copies them by operations."""
    model, x = Stack(4).float(), torch.zeros(60_000, 5)  # ten parts in a small ring
    options = {"micro_batches": 3, "precision": "fp32", "pinned_memory": pinned_memory}
    found = simulate(model, MACHINE, options)(x)
    calls = []
    monkeypatch.setattr(SimulatedStaging, "send", lambda *arguments: calls.append(Staging.send(*arguments)))
    assert simulate(model, MACHINE, options)(x) == found and calls


def test_a_step_that_differs_from_the_one_before_says_so(monkeypatch):
    model, x, options = Stack(3), rows(6, dtype=torch.float32), {"micro_batches": 3}
    assert simulate(model, MACHINE, options)(x).steady
    monkeypatch.setattr(simulated_loop, "_is_steady", lambda times, tolerance: False)
    found = simulate(model, MACHINE, options)(x)
    assert not found.steady and "no two steps in a row took as long" in str(found)


class Attention(nn.Module):
    """A layer of attention over 64 places, whose weights may be dropped."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout, self.all = dropout, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.all(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return x + found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("machine", ["h200", "cpu"])
def test_accelerators_drop_weights_within_attention(machine):
    """The host makes the matrix of weights for it; blocks of a machine with a GPU are traced on the host as well."""
    x = torch.randn(4, 64, WIDTH)
    plain, dropped = (
        simulate(nn.Sequential(*(Attention(p) for _ in range(2))), machine, {"micro_batches": 2}, loss=lambda y: y.sum())(x)
        for p in (0.0, 0.5)
    )
    on_a_gpu = machine == "h200"
    assert (dropped.seconds == plain.seconds) == on_a_gpu
    assert (dropped.peak_device_bytes == plain.peak_device_bytes) == on_a_gpu
    weights = 2 * 2 * 64 * 64 * 4  # of a micro-batch
    assert on_a_gpu or dropped.peak_device_bytes > plain.peak_device_bytes + weights
