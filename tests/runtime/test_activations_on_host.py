"""The option `keep_on_host`: what forward computes inside of layers goes to the host, and comes back for backward. No number changes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import l2l_compile
from kept_cases import MODELS, MUCH, UPDATES, assert_equal_bits, assert_equal_gradients, trained
from l2l_compile.devices.device import LinkRates
from l2l_compile.errors import OptionError
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.options import Options
from l2l_compile.runtime.activation_room import ActivationRoom
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.stats import Stats
from l2l_compile.session import session_of
from l2l_compile.simulation.machine import Machine
from models import Stack, compiled, loss_of, rows


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_depends_on_what_goes_to_the_host(name, update):
    assert_equal_bits(name, keep=0, keep_on_host=MUCH, **UPDATES[update])


@pytest.mark.parametrize("keep, on_host", [(0, 700), (0, 3000), (700, 700), (2000, MUCH), (MUCH, MUCH), ("auto", 2000)])
@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "u-net"])
def test_no_bit_depends_on_where_it_is_kept(name, keep, on_host):
    assert_equal_bits(name, keep=keep, keep_on_host=on_host)


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"precision": "fp16"}, {"stash": "device"}, {"micro_batches": 1}, {"prefetch": 0}], ids=str
)
@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "convolutions"])
def test_no_bit_depends_on_it_with_other_options(name, options):
    assert_equal_bits(name, dtype=torch.float32, keep=2000, keep_on_host=MUCH, **options)


@pytest.mark.parametrize("keep", [0, 1500])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["stack", "u-net", "two heads"])
def test_copies_beside_the_micro_batches_are_waited_for(threaded, name, prefetch, keep):
    """Lanes work at once here, and accesses are watched."""
    step = assert_equal_bits(name, check=True, keep=keep, keep_on_host=MUCH, prefetch=prefetch)
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("keep", [0, 100, 1000])
@pytest.mark.parametrize("on_host", [1, 100, 1000, 3000, 10_000])
def test_neither_memory_keeps_more_than_its_option(keep, on_host):
    _, without = trained("stack", 0, micro_batches=4)
    expected, _ = trained("stack", 0, micro_batches=4)
    found, step = trained("stack", keep, keep_on_host=on_host, micro_batches=4)
    assert all(map(torch.equal, found, expected))
    kept = _report(step, keep=keep, keep_on_host=on_host).kept
    assert kept.bytes <= keep and kept.on_host <= on_host
    assert (kept.bytes, kept.on_host) == (l2l_compile.stats(step).kept_bytes, l2l_compile.stats(step).kept_on_host_bytes)
    if keep + on_host >= 1000:
        assert kept.bytes + kept.on_host > 0
    copied = l2l_compile.stats(step).offloaded_bytes - l2l_compile.stats(without).offloaded_bytes
    assert copied == l2l_compile.stats(step).restored_bytes - l2l_compile.stats(without).restored_bytes == kept.on_host


def _report(step, shape=(7, 5), **options):
    options = {"micro_batches": 4, "block_compiler": "eager", "device": "cpu", **options}
    return l2l_compile.explain(copy.deepcopy(step._orig_mod), options=options)(rows(*shape))


@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "u-net", "funnel", "convolutions"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("keep, on_host", [(0, 2000), (0, MUCH), (1500, 1500)])
def test_the_peak_is_the_expected_one(name, keep, on_host, prefetch):
    build, shape = MODELS[name]
    options = {
        "keep": keep,
        "keep_on_host": on_host,
        "micro_batches": 12,
        "prefetch": prefetch,
    }  # a quarter of them is copied at once
    step = compiled(build().double(), **options)
    loss_of(step(rows(14, *shape))).backward()
    report = _report(step, (14, *shape), **options)
    assert l2l_compile.stats(step).peak_device_bytes == report.device_memory.peak
    assert report.host_memory.activations == report.kept.on_host > 0


def test_device_memory_does_not_grow_with_what_is_on_the_host():
    """All layers keep all that they can, and the device has a few micro-batches of it at a time."""
    peaks = set()
    for depth in (8, 16, 32):
        step = compiled(Stack(depth).double(), keep_on_host="1GB", micro_batches=8)
        for _ in range(2):
            step(rows(16)).pow(2).mean().backward()
        peaks.add(l2l_compile.stats(step).peak_device_bytes)
    assert len(peaks) == 1


def test_the_program_shows_both_ways():
    _, step = trained("stack", 0, keep_on_host=MUCH)
    (program,) = l2l_compile.programs(step)
    text = str(program)
    assert str(Program.parse(text)) == text
    assert "offload_activations('layers.1', %forward_2)" in text and "restored_activations=%restore_activations_2" in text
    sent = program.forward.graph.find_nodes(op="call_function", target=nodes.offload_activations)
    brought = program.backward.graph.find_nodes(op="call_function", target=nodes.restore_activations)
    assert len(sent) == len(brought) == len(program.segments)


class Swaps:
    """A pass that mixes up what two segments have sent."""

    name, requires, provides = "swaps", frozenset(), frozenset()

    def apply(self, compilation):
        outputs, (*stashes, one, other), writes = nodes.returned(compilation.forward)
        compilation.forward.output_node().args = ((outputs, (*stashes, other, one), writes),)


def test_what_comes_back_to_another_segment_is_refused():
    step = compiled(Stack(3).double(), keep_on_host=MUCH, passes=(Swaps(),))
    with pytest.raises(Exception, match="takes the place of 'inside of embed' in what forward keeps"):
        step(rows(6))


def test_other_forwards_keep_what_is_left_of_the_host_too(threaded):
    torch.manual_seed(0)
    model = Stack(3).double()
    step, twin = compiled(model, keep_on_host=5000, check=True), copy.deepcopy(model)
    batches = [rows(6) for _ in range(3)]
    for call in (step, twin):
        losses = [call(x).pow(2).sum() for x in batches]
        if call is step:
            assert 2500 < session_of(step).waiting.activations.host <= 5000
        for loss in losses:
            loss.backward()
    assert_equal_gradients(model, twin)
    assert session_of(step).waiting.activations.both == 0


def test_a_failed_copy_to_the_host_leaves_nothing_behind(threaded, monkeypatch):
    _, step = trained("stack", 0, keep_on_host=MUCH)
    device, x = session_of(step).device, rows(6)
    plain, calls = type(device).download_together, []

    def fails(self, tensors):
        calls.append(tensors)
        if len(calls) == 5:
            raise OSError("on purpose")
        return plain(self, tensors)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="on purpose"):
        patch.setattr(type(device), "download_together", fails)
        step(x).pow(2).sum().backward()
    step(x).pow(2).sum().backward()
    assert device.ledger.held == 0


def test_a_simulated_step_is_shorter_by_what_the_link_carries():
    """With all of it on the host, compute waits for the link; "auto" stops before that."""
    model, x = Stack(12, width=512, hidden=2048), rows(4096, 5, dtype=torch.float32)
    machine = replace(Machine.load("rtx4090"), flops={"float32": 5e12}, host_memory=1e9, host_reserve=0.0, h2d=5e9, d2h=5e9)
    options = {"micro_batches": 8, "block_compiler": "eager"}
    none, auto, everything = (
        l2l_compile.simulate(copy.deepcopy(model), machine, {**options, "keep_on_host": keep})(x) for keep in (0, "auto", "100GB")
    )
    assert none.stats.offloaded_bytes < auto.stats.offloaded_bytes < everything.stats.offloaded_bytes
    assert auto.seconds < min(none.seconds, everything.seconds)
    assert auto.stats.peak_device_bytes < 1.2 * none.stats.peak_device_bytes  # three micro-batches of eight, of one layer


class Link:
    """A device with a link of 100 bytes a second to a host with 64,000 bytes."""

    is_host = False

    def link_rates(self):
        return LinkRates(100.0, 100.0)

    def host_memory_available(self):
        return 64_000


def test_auto_keeps_what_the_link_could_have_carried():
    room = ActivationRoom(Link(), 0, "auto")
    for seconds in (30.0, 10.0, 11.0):  # the first ones compile
        assert room.at((2, 5)) == Room()
        room.measured((2, 5), Stats(0, 1000, offloaded_bytes=100, forward_seconds=seconds, backward_seconds=2 * seconds), Room())
    # forward: 0.9 x 100 / s x 10 s - 100 = 800; backward: 0.9 x 100 x 20 x 2/3 - 500 = 700
    assert room.at((2, 5)) == Room(0, 0)  # less than a part of 1,000 bytes
    assert room.at((20, 5)) == Room(0, 7000)  # ten times as much work
    assert room.at((200, 50)) == Room(0, 32_000)  # half of the host
    assert ActivationRoom(Link(), 0, 500).at((1,)) == Room(0, 500)


@pytest.mark.parametrize("keep", [-1, True, "much", 1.5, None])
def test_keep_on_host_is_a_number_of_bytes_or_auto(keep):
    if keep is None:
        assert Options.build({"keep_on_host": None}).keep_on_host == 0
        return
    with pytest.raises(OptionError, match="'keep_on_host' must be bytes"):
        torch.compile(Stack(2), backend="l2l", options={"keep_on_host": keep})
