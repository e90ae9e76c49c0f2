"""The option `resident` in training: weights stay on the device from forward to backward. No number changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import l2l_compile
from kept_cases import MODELS, UPDATES, trained
from l2l_compile.ir.program import Program
from l2l_compile.session import session_of
from models import Stack, compiled, loss_of, rows

ALL = "1GB"
LAYER = sum(p.nbytes for p in Stack(1).double().layers.parameters())


def assert_equal_bits(name, resident=ALL, **options):
    expected, _ = trained(name, 0, resident=0, **options)
    found, step = trained(name, 0, resident=resident, **options)
    assert all(map(torch.equal, found, expected))
    return step


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_depends_on_weights_that_stay(threaded, name, update):
    step = assert_equal_bits(name, check=True, **UPDATES[update])
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"precision": "fp16"}, {"stash": "device"}, {"micro_batches": 1}, {"prefetch": 0}], ids=str
)
@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_no_bit_depends_on_them_with_other_options(request, lanes, options):
    if lanes == "threads":
        request.getfixturevalue("threaded")
    for update in ({}, UPDATES["in_forward"]):
        assert_equal_bits("stack", dtype=torch.float32, **options, **update)


@pytest.mark.parametrize("room", [1, 1000, LAYER, 2 * LAYER + 1, 5 * LAYER, ALL])
def test_they_cross_the_link_once_and_within_the_room(threaded, room):
    peaks, fetched = [], []
    for resident in (0, room):
        _, step = trained("stack", 0, resident=resident)
        stats = l2l_compile.stats(step)
        peaks.append(stats.peak_device_bytes)
        fetched.append(stats.fetched_bytes)
    (program,) = l2l_compile.programs(step)
    sizes = [s.block.weight_bytes(program.bindings) for s in program.resident]
    limit = 1 << 30 if room == ALL else room
    assert sum(sizes) <= limit
    assert peaks[1] <= peaks[0] + limit
    assert fetched[1] <= fetched[0]
    if room == ALL:
        assert {s.name for s in program.resident} == {s.name for s in program.segments if s.weights}
        assert fetched[1] == sum(sizes)
    if room == 2 * LAYER + 1:
        assert len(sizes) >= 2


def test_a_table_of_which_backward_reads_nothing_does_not_stay():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rest = nn.Embedding(100, 5), Stack(2)

        def forward(self, x):
            return self.rest(self.table(x))

    model = Tokens().double()
    step = compiled(model, resident=ALL)
    step(torch.arange(12).view(6, 2)).pow(2).mean().backward()
    (program,) = l2l_compile.programs(step)
    assert [s.name for s in program.streamed if s.weights] == ["table"]


@pytest.mark.parametrize("resident", [2 * LAYER + 1, ALL])
@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "convolutions"])
def test_the_peak_is_the_expected_one(name, resident):
    build, shape = MODELS[name]
    model, x = build().double(), rows(7, *shape)
    options = {"micro_batches": 3, "block_compiler": "eager", "resident": resident, "device": "cpu"}
    expected = l2l_compile.explain(copy.deepcopy(model), options=options)(x).device_memory.peak
    step = compiled(model, resident=resident)
    loss_of(step(x)).backward()
    assert l2l_compile.stats(step).peak_device_bytes == expected


def test_a_backward_that_does_not_come_frees_them(threaded):
    step = compiled(Stack(3).double(), resident=ALL)
    loss = step(rows(6)).pow(2).sum()
    assert session_of(step).device.ledger.held > 0
    del loss
    step(rows(6)).pow(2).sum().backward()
    assert session_of(step).device.ledger.held == 0


def test_the_host_keeps_no_wire_of_them():
    """With update='at_step', a wire is freed when its weights have crossed the link for the last time."""
    held = []
    for resident in (0, ALL):
        _, step = trained("stack", 0, resident=resident, dtype=torch.float32, precision="bf16")
        held.append(len(session_of(step).server.wires._wires))
    assert held[1] == held[0]


def test_the_program_shows_which_weights_stay():
    _, step = trained("stack", 0, resident=2 * LAYER + 1)
    (program,) = l2l_compile.programs(step)
    text = str(program)
    assert str(Program.parse(text)) == text
    name = program.resident[0].name
    assert f"%fetch_resident = fetch_resident('{name}')" in text and f"keep_weights('{name}', %fetch_resident)" in text
    assert f"weights of {name}" in text
