"""A profiled step has the spans of a simulated one, computes the same numbers, and leaves the lanes as they were."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest
import torch

import l2l_compile
from l2l_compile import L2LError, Machine, OptionError, simulate
from l2l_compile.session import session_of
from l2l_compile.timeline import save_together
from models import Stack, loss_of, rows

MACHINE = dataclasses.replace(Machine.load("h200"), flops={"float32": 1e9})
OPTIONS = [
    {"micro_batches": 3},
    {"micro_batches": 2, "prefetch": 0, "stash": "device"},
    {"micro_batches": 3, "update": "in_backward", "precision": "fp32"},
]
KEPT = "fetch_weights layers.3"  # forward leaves it in its slab: in backward, the lane has a span that copies nothing
KINDS = ("fetch_weights", "restore", "offload", "forward", "backward", "push_gradients", "update", "accumulate")


def compiled_model(options, layers=4):
    model = Stack(layers).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"block_compiler": "eager", "device": "cpu", **options}
    if "update" in options:
        chosen["optimizer"] = optimizer
    return model, torch.compile(model, backend="l2l", options=chosen), optimizer


def step(compiled, optimizer, x):
    loss = loss_of(compiled(x))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    return loss.item()


def labels(timeline, lane):
    """The nodes that a lane carried out, in order: those that move or compute something. Neighbours are one."""
    found = [p.label.split(",")[0] for p in timeline.of(lane) if p.label.split(" ")[0] in KINDS]
    return [label for label, _ in itertools.groupby(found)]


def micro_batches(timeline, lane):
    """The micro-batches that a lane computed, in order."""
    return [label for label, _ in itertools.groupby(p.label for p in timeline.of(lane) if "micro-batch" in p.label)]


def traced_step(options, x):
    model, compiled, optimizer = compiled_model(options)
    plain = copy.deepcopy(model)
    for _ in range(2):
        step(compiled, optimizer, x)
    with l2l_compile.profile(compiled) as measured:
        step(compiled, optimizer, x)
    return plain, measured.timeline


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_spans_are_those_of_a_simulation(threaded, options):
    x = rows(6, dtype=torch.float32)
    plain, timeline = traced_step(options, x)
    if "update" in options:
        options = {**options, "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1)}
    simulated = simulate(plain, MACHINE, {"block_compiler": "eager", **options}, loss=loss_of)(x).timeline
    for lane in ("compute", "h2d", "d2h", "caller"):
        measured = labels(timeline, lane)
        if lane == "h2d" and options.get("prefetch", 1) == 1:
            del measured[measured.index(KEPT, measured.index("backward head"))]
        assert measured == labels(simulated, lane) and measured, lane
    assert set(labels(timeline, "host")) >= set(labels(simulated, "host")) and labels(timeline, "host")
    assert micro_batches(timeline, "compute") == micro_batches(simulated, "compute")
    assert "backward layers.3, micro-batch 2" in micro_batches(timeline, "compute")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_where_the_host_is_the_device_lanes_are_the_callers_work(options):
    x = rows(6, dtype=torch.float32)
    plain, timeline = traced_step(options, x)
    if "update" in options:
        options = {**options, "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1)}
    machine = dataclasses.replace(MACHINE, overlaps=False)
    simulated = simulate(plain, machine, {"block_compiler": "eager", **options}, loss=loss_of)(x).timeline
    assert {span.lane for span in timeline.spans} == {"caller", "host"}
    assert labels(timeline, "caller") == labels(simulated, "caller") and labels(timeline, "caller")
    assert micro_batches(timeline, "caller") == micro_batches(simulated, "caller")


def test_spans_of_a_lane_are_in_order_within_the_step(threaded):
    threaded.delay = 0.01
    _, timeline = traced_step({"micro_batches": 3, "prefetch": 0}, rows(6, dtype=torch.float32))
    for lane in ("compute", "h2d", "d2h", "caller", "host"):
        spans = timeline.of(lane)
        assert spans and all(a.end <= b.start for a, b in itertools.pairwise(spans))
        assert all(0 <= span.start <= span.end <= timeline.seconds for span in spans)
    assert any("fetch_weights" in gap.waited_for for gap in timeline.gaps("compute"))  # delays of the lanes are random


def test_a_traced_model_computes_the_same_on_its_own_lanes(threaded, tmp_path):
    torch.manual_seed(0)
    options = {"micro_batches": 3, "stash": "device", "prefetch": 3}
    model, compiled, optimizer = compiled_model(options)
    other = copy.deepcopy(model)
    chosen = torch.compile(other, backend="l2l", options={"block_compiler": "eager", "device": "cpu", **options})
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    x = rows(6, dtype=torch.float32)
    with l2l_compile.profile(compiled, tmp_path / "step.json") as measured:  # before its first call
        losses = [step(compiled, optimizer, x)]
        device = session_of(compiled).device
        assert "begins" in vars(device)
        with pytest.raises(L2LError, match="the timeline of a profile exists after"):
            measured.timeline  # noqa: B018
        with pytest.raises(L2LError, match="profiled already"), l2l_compile.profile(compiled):
            pass
    assert not {"begins", "begins_micro_batch", "synchronize"} & set(vars(device)) and not device.profiled
    assert not any("Observed" in type(lane).__name__ for lane in device.lanes.values())
    assert "submit" not in vars(session_of(compiled).server.worker)
    losses += [step(compiled, optimizer, x) for _ in range(2)]
    assert losses == [step(chosen, its, x) for _ in range(3)]
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    saved = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in saved) == len(measured.timeline.spans) > 20


def test_a_measured_and_a_simulated_timeline_go_into_one_file(tmp_path):
    x = rows(6, dtype=torch.float32)
    plain, timeline = traced_step({"micro_batches": 3}, x)
    simulated = simulate(plain, "cpu", {"block_compiler": "eager", "micro_batches": 3})(x).timeline
    save_together({"measured": timeline, "simulated": simulated}, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"measured", "simulated"}


def test_a_step_that_fails_ends_the_trace(tmp_path):
    _, compiled, optimizer = compiled_model({"micro_batches": 3})
    with pytest.raises(ZeroDivisionError), l2l_compile.profile(compiled, tmp_path / "step.json"):
        raise ZeroDivisionError
    assert not (tmp_path / "step.json").exists()
    step(compiled, optimizer, rows(6, dtype=torch.float32))
    assert not session_of(compiled).device.profiled


def test_a_trace_without_a_step_is_an_error():
    _, compiled, _ = compiled_model({"micro_batches": 3, "prefetch": 4})
    with pytest.raises(L2LError, match="the model did not run within the profile"), l2l_compile.profile(compiled):
        pass


def test_what_is_not_compiled_cannot_be_profiled():
    with pytest.raises(TypeError, match="expected a module or function from torch.compile"):
        l2l_compile.profile(Stack(2))
    with pytest.raises(OptionError):
        l2l_compile.profile(torch.compile(Stack(2), backend="l2l", options={"micro_batches": 0}))


def ranges_of(profiled):
    return [event.key for event in profiled.key_averages() if event.key.startswith("l2l ")]


@pytest.mark.parametrize("device", ["cpu", "threaded"])
def test_profilers_see_ranges(device, request):
    if device == "threaded":
        request.getfixturevalue("threaded")
    _, compiled, optimizer = compiled_model({"micro_batches": 2})
    x = rows(4, dtype=torch.float32)
    step(compiled, optimizer, x)
    lanes = session_of(compiled).device.lanes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        step(compiled, optimizer, x)
    assert session_of(compiled).device.lanes is lanes
    if device == "cpu":  # a profiler sees the thread that has begun it
        assert {"l2l h2d: fetch_weights layers.1", "l2l compute: backward layers.2, micro-batch 2"} <= set(ranges_of(profiled))


def test_a_profile_is_of_the_session_that_serves_the_model():
    """Other models with equal options are alive: one whose code is of no use here, and one whose code Dynamo uses again."""
    options, x = {"micro_batches": 2, "block_compiler": "eager", "device": "cpu"}, rows(4).float()
    other, same = (torch.compile(m.float(), backend="l2l", options=options) for m in (torch.nn.Linear(5, 4), Stack(3)))
    for compiled in (other, same):
        loss_of(compiled(x)).backward()
    for layers in (2, 3):
        compiled = torch.compile(Stack(layers).float(), backend="l2l", options=options)
        assert l2l_compile.programs(compiled) == ()  # not those of another model
        with l2l_compile.profile(compiled) as measured, l2l_compile.profile(other) as nested:
            loss_of(compiled(x)).backward()
            loss_of(other(x)).backward()
        assert measured.timeline.spans and nested.timeline.spans
        assert (session_of(compiled) is session_of(same)) == (layers == 3)
