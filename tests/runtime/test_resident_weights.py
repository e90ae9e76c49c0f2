"""Weights that fit on the device stay there from call to call without gradients."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.devices.device import MemoryState
from l2l_compile.errors import OptionError
from l2l_compile.memory.layout import aligned
from l2l_compile.runtime.resident_weights import MeasuredNeed, ResidentWeights
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Stack, compiled, rows

LAYERS = 6
ALL = 1 << 30


def sizes(model) -> list[int]:
    """Bytes of the segments of a stack, in order."""
    return [sum(p.nbytes for p in part.parameters()) for part in (model.embed, *model.layers, model.head)]


class Serving:
    """Calls without gradients: eager's results, and the streamed ones, which must be equal."""

    def __init__(self, **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain = Stack(LAYERS).double()
        self.model = copy.deepcopy(self.plain)
        self.step = compiled(self.model, **{"check": True, "dynamic": True, **options})

    def call(self, count=6):
        x = rows(count)
        with torch.no_grad():
            torch.testing.assert_close(self.step(x), self.plain(x), rtol=1e-12, atol=1e-12)
        return l2l_compile.stats(self.step)

    def both(self, change):
        for model in (self.plain, self.model):
            with torch.no_grad():
                change(model)

    @property
    def resident(self):
        return session_of(self.step).resident


@pytest.fixture
def bounded(threaded, monkeypatch):
    """The device has `bounded.total` bytes."""
    bounds = SimpleNamespace(total=1 << 20)

    def memory(device):
        held = device.ledger.all_held
        return MemoryState(held, bounds.total - held, bounds.total)

    monkeypatch.setattr(ThreadedDevice, "memory", memory)
    return bounds


def test_all_weights_cross_the_link_once(threaded):
    serving = Serving(resident=ALL)
    total = sum(sizes(serving.model))
    assert serving.call().fetched_bytes == total
    for count in (6, 7, 5):
        stats = serving.call(count)
        assert (stats.fetched_bytes, stats.resident_bytes) == (0, total)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_weights_that_do_not_fit_cross_in_each_call(threaded, prefetch):
    serving = Serving(resident="8KiB", prefetch=prefetch)
    total = sum(sizes(serving.model))
    for stats in (serving.call() for _ in range(3)):
        assert stats.fetched_bytes + stats.resident_bytes == total
        assert 0 < serving.resident.bytes <= 8 << 10
    assert 4 << 10 < stats.resident_bytes <= 8 << 10


def test_segments_that_stay_are_spread_over_the_program(threaded):
    layer = sum(aligned(p.nbytes) for p in Stack(1).double().layers[0].parameters())
    serving = Serving(resident=2 * layer + 1024)
    serving.call()
    there = {weight._storage() for entry in serving.resident._entries.values() for weight in entry._weights}
    stays = [next(layer.parameters()).untyped_storage() in there for layer in serving.model.layers]
    assert sum(stays) == 2
    assert (True, True) not in itertools.pairwise(stays)


def test_by_default_a_device_without_bound_keeps_nothing(threaded):
    serving = Serving()
    assert [serving.call().fetched_bytes for _ in range(2)] == [sum(sizes(serving.model))] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.layers[1].apply(lambda m: [p.mul_(2) for p in m.parameters(recurse=False)]),
        lambda model: [p.data.mul_(2) for p in model.layers[3].parameters()],
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones_like(model.head.weight))),
        lambda model: model.embed.weight.numpy().__imul__(3),
        lambda model: model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()}),
    ],
    ids=["in_place", "data", "replaced", "numpy", "state_dict"],
)
def test_what_is_written_into_weights_is_seen(threaded, change):
    serving = Serving(resident=ALL)
    serving.call()
    serving.both(change)
    assert serving.call().fetched_bytes > 0
    assert serving.call().fetched_bytes == 0


def test_training_has_the_device_for_itself(threaded):
    serving = Serving(resident=ALL)
    serving.call()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (serving.plain, serving.model)]
    for call, optimizer in zip((serving.plain, serving.step), optimizers, strict=True):
        call(torch.ones(6, 5, dtype=torch.float64)).square().sum().backward()
        assert serving.resident.bytes == 0 or call is serving.plain
        optimizer.step()
        optimizer.zero_grad()
    serving.call()
    assert serving.call().fetched_bytes == 0


@pytest.mark.parametrize("options", [{"update": "in_forward"}, {"update": "in_forward", "delay": 1}, {"update": "in_backward"}])
def test_an_evaluation_has_the_weights_of_the_last_step(threaded, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(3)
    x = rows(6, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, resident=ALL, **options)
    for _ in range(3):
        step(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            with torch.no_grad():
                found = step(x)
            l2l_compile.synchronize(step)
            torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert l2l_compile.stats(step).fetched_bytes == 0


def test_a_call_keeps_what_fits_beside_what_it_needs(bounded):
    serving = Serving()
    first = serving.call()
    assert (serving.resident.bytes, first.resident_bytes) == (0, 0)
    bounded.total = int(1.25 * (first.peak_device_bytes + sum(sizes(serving.model)[1:4]))) + 4096
    stats = [serving.call() for _ in range(3)][-1]
    assert 0 < stats.resident_bytes < sum(sizes(serving.model))
    assert stats.peak_device_bytes <= 0.81 * bounded.total


def test_weights_make_room_for_larger_calls(bounded):
    """Ten times as many rows may need a hundred times the memory, until it is measured."""
    serving = Serving()
    bounded.total = 1 << 16
    for _ in range(3):
        serving.call(6)
    assert serving.resident.bytes > 0
    assert serving.call(7).fetched_bytes == 0
    assert serving.call(60).resident_bytes == 0
    assert serving.call(60).fetched_bytes == sum(sizes(serving.model))
    assert serving.call(62).fetched_bytes == 0


def test_a_smaller_call_says_nothing_about_larger_ones(bounded):
    serving = Serving()
    for count in (60, 60, 6, 6):
        serving.call(count)
    (runner,) = session_of(serving.step).runners
    before = runner._need.bytes
    serving.call(60)
    assert runner._need.bytes == before


def test_weights_make_room_for_calls_that_need_more(bounded):
    serving = Serving()
    for _ in range(3):
        peak = serving.call(6).peak_device_bytes
    before, bounded.total = serving.resident.bytes, int(1.25 * peak) - 4096
    stats = serving.call(6)
    assert 0 < serving.resident.bytes < before
    assert stats.peak_device_bytes <= 0.81 * bounded.total


def test_a_call_that_runs_out_of_memory_runs_again_without(threaded, monkeypatch):
    serving = Serving(resident=ALL)
    serving.call()
    hold, left, lost = ThreadedDevice.hold, [3], []

    def failing(device, tensors):
        left[0] -= 1
        if left[0] == -1:
            still = sum(tensor() is not None for tensor in lost)
            assert still <= 8 < len(lost), "the second try needs this memory, but for what a thread has worked on last"
        if left[0] == 0:
            lost.extend(weakref.ref(t) for entry in serving.resident._entries.values() for t in entry.tensors)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        hold(device, tensors)

    monkeypatch.setattr(ThreadedDevice, "hold", failing)
    with pytest.warns(UserWarning, match="ran out of memory beside .* of weights that stay there.*Tried to allocate"):
        assert serving.call().fetched_bytes == sum(sizes(serving.model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving.call().fetched_bytes == 0


def test_without_residents_memory_that_runs_out_is_an_error(threaded, monkeypatch):
    serving = Serving(resident=0)
    serving.call()

    def failing(device, tensors):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ThreadedDevice, "hold", failing)
    with pytest.raises(torch.OutOfMemoryError):
        serving.call()


def test_weights_of_a_module_that_is_gone_are_freed(threaded):
    serving = Serving(resident=ALL)
    serving.call()
    before = serving.resident.bytes
    serving.both(lambda model: setattr(model, "head", nn.Identity()))
    gc.collect()
    serving.call()
    assert serving.resident.bytes < before
    assert serving.resident.bytes == session_of(serving.step).device.ledger.held


def test_weights_used_more_often_take_the_place_of_others(threaded):
    """An encoder runs once for each text, a decoder for each token."""
    device = ThreadedDevice(0.0, 0, None)
    resident, need = ResidentWeights(device, 1000), MeasuredNeed()
    segments = {name: [torch.zeros(100)] for name in ("encoder", "decoder")}

    def call(name):
        resident.begin(need, (), 1000)
        found = resident.find((name,), segments[name])
        if found is None and (found := resident.admit((name,), 1000)) is not None:
            found.fill([torch.zeros(100)], segments[name])
        resident.end(need, ())
        return found is not None

    names = ("encoder", "decoder", "decoder", "decoder", "decoder", "encoder")
    assert [call(name) for name in names] == [True, False, False, True, True, False]


@pytest.mark.parametrize("size", [-1, "much", True, 1.5])
def test_the_option_is_a_number_of_bytes(size):
    with pytest.raises(OptionError, match="'resident' must be bytes"):
        compiled(Stack(2), resident=size)


@pytest.mark.parametrize("options", [{}, {"update": "in_forward"}, {"update": "in_backward"}], ids=str)
@pytest.mark.parametrize("compile_update", [True, False])
def test_evaluations_within_a_step_keep_no_old_weights(threaded, options, compile_update):
    """The optimizer changes one row of a table, which a few entries do not show."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(999, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    if options:
        options = {**options, "optimizer": optimizers[1], "compile_update": compile_update}
    step, x = compiled(model, resident=ALL, **options), torch.full((6, 1), 7)

    def evaluated():
        with torch.no_grad():
            torch.testing.assert_close(step(x), plain(x), rtol=1e-5, atol=1e-6)

    for _ in range(3):
        losses = [call(x).square().mean() for call in (plain, step)]
        if options.get("update") == "in_backward":  # its updates are made in backward, so that eager is behind
            with torch.no_grad():
                step(x)
        else:
            evaluated()
        for loss in losses:
            loss.backward()
        if options.get("update") != "in_backward":
            evaluated()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        evaluated()
        evaluated()


def test_evaluations_beside_delayed_updates_are_of_the_newest(threaded):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(999, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step, x = compiled(model, resident=ALL, optimizer=optimizer, update="in_forward", delay=1), torch.full((6, 1), 7)
    for _ in range(4):
        loss = step(x).square().mean()
        for finish in (lambda: None, loss.backward, optimizer.step):
            finish()
            with torch.no_grad():
                found = step(x)
            l2l_compile.synchronize(step)
            torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
