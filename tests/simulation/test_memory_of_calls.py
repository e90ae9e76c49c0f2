"""The device memory that a report counts for calls without gradients is the memory that calls take, with weights that stay."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import l2l_compile
from l2l_compile import Machine, explain, simulate
from l2l_compile.devices.device import MemoryState
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from l2l_compile.units import format_bytes
from models import Stack, rows

ROWS, PROMPT, CALLS = 4, 96, 6
OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def bytes_of(model) -> int:
    return sum(p.nbytes for p in model.parameters())


def machine_of(total):
    """A machine whose device has `total` bytes."""
    return replace(Machine.load("h200"), device_memory=float(total), device_reserve=0.0)


@pytest.fixture
def on(threaded, monkeypatch):
    """The function that gives the device of the tests as much memory as a machine's has."""

    def bounded(machine):
        def memory(device):
            held = device.ledger.all_held
            return MemoryState(held, machine.device_room - held, int(machine.device_memory))

        monkeypatch.setattr(ThreadedDevice, "memory", memory)

    threaded.delay = 0
    return bounded


class Text:
    """A text that a model continues on the device of the tests, token by token; and its report before each token."""

    def __init__(self, kind, machine, **options):
        self.model, self.machine, self.options = llama(), machine, {**OPTIONS, **options}
        self.step = torch.compile(self.model, backend="l2l", options=self.options)
        self.cache = (
            DynamicCache(config=self.model.config)
            if kind == "dynamic"
            else StaticCache(config=self.model.config, max_cache_len=128)
        )
        self.call(PROMPT)

    def call(self, length):
        with torch.no_grad():
            self.step(torch.ones(ROWS, length, dtype=torch.long), None, None, self.cache)

    def report(self):
        token = torch.ones(ROWS, 1, dtype=torch.long)
        with torch.no_grad():
            return explain(self.model, {**self.options, "device": "cpu"})(token, None, None, self.cache).on(self.machine)


@pytest.mark.parametrize(
    ("kind", "room", "resident"),
    [
        ("static", 1.9e6, None),
        ("static", 2.3e6, 0),
        ("static", 1e9, "300KB"),
        ("dynamic", 2.3e6, None),
        ("dynamic", 1e9, "1GB"),
    ],
    ids=str,
)
def test_a_token_takes_the_device_memory_of_its_report(on, kind, room, resident):
    machine = machine_of(room)
    on(machine)
    text = Text(kind, machine, resident=resident)
    for _ in range(CALLS):
        text.call(1)
    expected = text.report().device_memory
    text.call(1)
    assert expected.peak == pytest.approx(l2l_compile.stats(text.step).peak_device_bytes, rel=0.02)
    if kind == "static":
        staying = expected.staying.bytes if expected.staying is not None else 0
        assert staying == session_of(text.step).resident.bytes


@pytest.mark.parametrize("share", [0.3, 0.6, 100])
def test_segments_that_stay_are_those_of_the_report(on, share):
    model, x = Stack(6, width=64).eval(), rows(6, dtype=torch.float32)
    machine = machine_of(share * bytes_of(model) + 2e5)
    on(machine)
    step = torch.compile(model, backend="l2l", options=OPTIONS)
    for _ in range(CALLS):
        with torch.no_grad():
            step(x)
    with torch.no_grad():
        report = explain(model, {**OPTIONS, "device": "cpu"})(x).on(machine)
    staying, entries = report.device_memory.staying, session_of(step).resident._entries.values()
    there = {weight._storage() for entry in entries for weight in entry._weights}
    for segment in report.segments:
        weights = [p.untyped_storage() in there for p in model.get_submodule(segment.name).parameters()]
        assert weights == [segment.name in staying.segments] * len(weights)
    assert (share == 100) == (staying.fetched == 0)
    assert staying.fetched == pytest.approx(l2l_compile.stats(step).fetched_bytes, rel=0.02)
    assert f"of the weights, {format_bytes(staying.bytes)} stay on the device from call to call" in str(report)


def test_two_programs_of_a_call_share_the_device(on):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Stack(4, width=64), Stack(4, width=64)

        def forward(self, x):
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x * y.mean())

    model, x = Cut().eval(), rows(6, dtype=torch.float32)
    machine = machine_of(0.5 * bytes_of(model) + 5e5)
    on(machine)
    step = torch.compile(model, backend="l2l", options=OPTIONS)
    with torch.no_grad():
        for _ in range(CALLS):
            step(x)
        report = explain(model, {**OPTIONS, "device": "cpu"})(x).on(machine)
    assert len(report.programs) == 2
    assert bytes_of(model) > report.device_memory.staying.bytes == session_of(step).resident.bytes > 0


@pytest.mark.parametrize("resident", [None, "300KB"])
def test_a_page_counts_the_weights_that_stay_as_its_step_does(resident):
    model, token, options = llama(), torch.ones(ROWS, 1, dtype=torch.long), {**OPTIONS, "resident": resident}
    cache, machine = StaticCache(config=model.config, max_cache_len=128), machine_of(2.3e6)
    with torch.no_grad():
        model(torch.ones(ROWS, PROMPT, dtype=torch.long), None, None, cache)
        report = explain(model, {**options, "device": "cpu"})(token, None, None, cache)
        call = simulate(model, machine, options)(token, None, None, cache)
    memory = report.on(machine).device_memory
    assert 0 < memory.staying.bytes < bytes_of(model)
    assert memory.peak == pytest.approx(call.peak_device_bytes, rel=0.001)
    assert memory.staying.bytes == pytest.approx(call.stats.resident_bytes, rel=0.001)
    assert memory.staying.fetched == pytest.approx(call.stats.fetched_bytes, rel=0.001)


def test_without_a_machine_the_option_says_what_stays(stand_in):
    model, x = Stack(6, width=64).eval(), rows(6, dtype=torch.float32)
    expected, found = {}, {}
    for resident in (0, None, "100KB", "1GB"):
        options = {**OPTIONS, "device": stand_in, "resident": resident}
        step = torch.compile(copy.deepcopy(model), backend="l2l", options=options)
        with torch.no_grad():
            expected[resident] = explain(model, options)(x)
            for _ in range(CALLS):
                step(x)
        found[resident] = l2l_compile.stats(step).peak_device_bytes
        assert expected[resident].device_memory.peak == pytest.approx(found[resident], rel=0.02)
    assert found[0] == found[None] < found["100KB"] < found["1GB"]
    assert expected[0].device_memory.staying is None
    assert "as far as its memory is free, which is not counted here" in " ".join(str(expected[None]).split())


def test_a_training_step_keeps_no_weights_from_call_to_call():
    model, x = Stack(6, width=64), rows(6, dtype=torch.float32)
    report = explain(copy.deepcopy(model), {**OPTIONS, "device": "cpu"})(x).on(Machine.load("h200"))
    assert report.device_memory.staying is None
