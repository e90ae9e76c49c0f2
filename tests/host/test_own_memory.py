"""Parameters that have the format of the link cross it from their own memory: no copy on the host, page-locked where they are."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.host import wire as wires
from l2l_compile.memory.in_place import PAGE, lock_in_place, locked_bytes, whole_pages
from l2l_compile.memory.pages import PinnedMemory
from models import compiled

WIDTH = 96  # a matrix of 16 bits has 4.5 pages


class Adapted(nn.Module):
    """A frozen matrix, trained matrices of low rank beside it."""

    def __init__(self, width=WIDTH, dtype=torch.bfloat16):
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x.to(self.base.weight.dtype)).float() + self.b(self.a(x)))


def plain(dtype=torch.bfloat16):
    return nn.Sequential(*(Adapted(dtype=dtype) for _ in range(3)))


def partly_frozen():
    model = plain()
    model[1].base.float().requires_grad_(True)
    return model


def tied():
    model = plain()
    model[2].base.weight = model[0].base.weight
    return model


def of_other_strides():
    model = plain()
    model[1].base.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16().t(), requires_grad=False)
    return model


def trained_in_16_bits():
    model = plain()
    model[1].base.requires_grad_(True)
    return model


MODELS = {
    "plain": plain,
    "fp16": lambda: plain(torch.float16),
    "fp32": lambda: plain(torch.float32),
    "partly frozen": partly_frozen,
    "tied": tied,
    "other strides": of_other_strides,
    "trained in 16 bits": trained_in_16_bits,
}
UPDATES = [{}, {"update": "in_backward"}, {"update": "in_forward", "delay": 1}]


@pytest.fixture
def no_weight_is_small(monkeypatch):
    monkeypatch.setattr(wires, "_SMALL", 0)


def trained(model, steps=3, between=lambda model, step: None, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    chosen = {"precision": "bf16", "optimizer": optimizer, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 trained parameters|2 trained parameters")
        step = compiled(model, **chosen)
        generator, losses = torch.Generator().manual_seed(0), []
        for number in range(steps):
            between(model, number)
            loss = step(torch.randn(4, model[0].a.in_features, generator=generator)).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        l2l_compile.synchronize(step)
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def assert_same_bits(found, expected):
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", UPDATES, ids=["at_step", "in_backward", "delay"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.slow(but=("*-at_step", "plain-*"))
def test_own_memory_gives_the_bits_of_a_wire(threaded, make, options, monkeypatch):
    threaded.delay = 0.0
    model = make()
    found = []
    for smallest in (0, 1 << 30):
        monkeypatch.setattr(wires, "_SMALL", smallest)
        found.append(trained(copy.deepcopy(model), **options))
    assert_same_bits(*found)


def test_only_trained_parameters_of_16_bits_are_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        l2l_compile.explain(plain(), {"device": "cpu", "precision": "bf16"})(torch.randn(4, WIDTH))
    with pytest.warns(UserWarning, match="2 trained parameters such as .*frozen ones may stay"):
        l2l_compile.explain(trained_in_16_bits(), {"device": "cpu", "precision": "bf16"})(torch.randn(4, WIDTH))


@pytest.mark.parametrize(("base", "options", "master", "wire"), [
    ("bfloat16", {}, 2, 0), ("float32", {}, 4, 2), ("bfloat16", {"delay": 1}, 2, 0), ("float32", {"delay": 1}, 4, 4),
    ("float32", {"precision": "fp32"}, 4, 0), ("bfloat16", {"precision": "fp32"}, 2, 0),
])  # fmt: skip
def test_the_report_counts_each_parameter_by_its_dtype(base, options, master, wire):
    model = nn.Sequential(*(Adapted(512, getattr(torch, base)) for _ in range(3)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    update = {"update": "in_forward"} if "delay" in options else {}
    chosen = {"device": "cpu", "precision": "bf16", "optimizer": optimizer, **update, **options}
    found = l2l_compile.explain(model, chosen)(torch.randn(4, 512)).host_memory
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = found.parameters - frozen
    assert abs(found.master - (master * frozen + 4 * trained)) <= 2 * 4 * 512 * 3
    assert abs(found.wire - wire * frozen) <= 2 * 4 * (trained + 3 * 2 * 512)


def write_into_a_frozen_parameter(how):
    def between(model, step):
        weight = model[1].base.weight
        new = torch.full_like(weight, 0.01 * (step + 1))
        if how == "data.copy_":
            weight.data.copy_(new)
        elif how == "data =":
            weight.data = new
        else:
            state = model.state_dict()
            model.load_state_dict({**state, "1.base.weight": new})

    return between


@pytest.mark.parametrize("how", ["data.copy_", "data =", "load_state_dict"])
def test_a_write_into_a_frozen_parameter_is_in_the_next_step(threaded, how, no_weight_is_small):
    threaded.delay = 0.0
    model = plain()
    expected = trained(copy.deepcopy(model), between=write_into_a_frozen_parameter("data.copy_"), device="cpu")
    written = trained(model, between=write_into_a_frozen_parameter(how))
    unwritten = trained(copy.deepcopy(model))
    assert_same_bits(written, expected)
    assert written[1] != unwritten[1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_frozen_parameters_are_locked_where_they_are(threaded, precision, no_weight_is_small):
    model = plain()
    trained(model, precision=precision)
    device, pages = threaded.devices[-1], 4 * PAGE
    for layer in model:
        first, last = whole_pages(layer.base.weight)
        assert device.locked[first] == last - first >= pages - PAGE
        start, end = locked_bytes(layer.base.weight)
        assert end - start == last - first
    assert device.pinned.used == sum(device.locked.values())


def test_copies_come_from_the_parameters_own_memory(threaded, no_weight_is_small, monkeypatch):
    sources = set()
    send = l2l_compile.devices.staging.Staging.send_in_place

    def seen(self, source, target, first, last):
        sources.add(source.data_ptr())
        assert first < last or source.numel() < WIDTH * WIDTH
        send(self, source, target, first, last)

    monkeypatch.setattr(l2l_compile.devices.staging.Staging, "send_in_place", seen)
    model = plain()
    trained(model)
    assert {layer.base.weight.data_ptr() for layer in model} <= sources


def test_parameters_that_are_gone_are_not_locked_any_more(threaded, no_weight_is_small):
    model = plain()
    trained(model)
    locked, spans = threaded.devices[-1].locked, [whole_pages(layer.base.weight)[0] for layer in model]
    model[0].base.weight.data = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    assert spans[0] not in locked and spans[1] in locked
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not any(span in locked for span in spans)


def test_a_budget_bounds_the_pages_that_are_locked(threaded, no_weight_is_small):
    model = nn.Sequential(*(Adapted(320) for _ in range(4)))  # 200 KiB each
    expected = trained(copy.deepcopy(model))
    assert_same_bits(trained(model, pinned_memory="1MiB"), expected)
    device = threaded.devices[-1]
    assert device.pinned.used <= 1 << 20
    assert 0 < sum(whole_pages(layer.base.weight)[0] in device.locked for layer in model) < 4


def test_pages_that_cannot_be_locked_are_copied_through_the_ring(threaded, no_weight_is_small):
    expected = trained(copy.deepcopy(model := plain()))
    first = [whole_pages(layer.base.weight)[0] for layer in model]

    def refuse(address, size):
        if address in first:
            raise RuntimeError("the memory cannot be locked")

    make = PinnedMemory.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedMemory, "__init__", lambda self, budget, lock, unlock: make(self, budget, refuse, lambda _: None))
        with pytest.warns(RuntimeWarning, match="page-lock a frozen parameter .*: the memory cannot be locked"):
            assert_same_bits(trained(model), expected)


def test_pages_are_locked_once_and_by_one_tensor_alone():
    locked = {}
    memory = PinnedMemory(None, locked.__setitem__, locked.__delitem__)
    whole = torch.zeros(10 * PAGE, dtype=torch.uint8)
    first, second, across = whole[: 5 * PAGE], whole[5 * PAGE :], whole[PAGE:]
    for tensor in (first, second, first, across):
        lock_in_place(tensor, memory)
    spans = sorted(locked.items())
    assert len(spans) == 2 and spans[0][0] + spans[0][1] <= spans[1][0]
    assert locked_bytes(across) == (0, 0) != locked_bytes(first)
    whole.share_memory_()  # moves it
    assert locked_bytes(first) == (0, 0)
    del whole, first, second, across, tensor
    assert not locked and memory.used == 0


# All of Python's objects, and what all threads allocate, lie in the one heap of the C library; large tensors have mappings.
_TENSORS_APART = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "4194304"}
_RESIDENT = """
import gc, json, re, sys, warnings
from pathlib import Path
import torch
from torch import nn
import l2l_compile
sys.path[:0] = {folders!r}
from test_own_memory import Adapted

def resident():
    # Of mappings of tensors: those of 16 MiB at least. Code, traces and Python's objects are in the heap, see _TENSORS_APART.
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]
    sizes = [[int(n) for n in re.findall(r"(?m)^(?:Size|Rss): +(\\d+) kB", m)] for m in mappings if "[heap]" not in m]
    return 1024 * sum(rss for size, rss in sizes if size >= 16 << 10)

def train(model, width):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {{"device": "cpu", "precision": {precision!r}, "optimizer": optimizer, "block_compiler": "eager"}}
    step = torch.compile(model, backend="l2l", options=options)
    for _ in range(2):
        step(torch.randn(2, width)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, l2l_compile.explain(step)(torch.randn(2, width)).host_memory

nn.init.kaiming_uniform_ = lambda tensor, **_: tensor.data.fill_(0.01)

def made(layers):
    return nn.Sequential(*(Adapted(4096, torch.{base}) for _ in range(layers)))

def grown(layers):
    gc.collect()
    before = resident()
    model = made(layers)
    step, memory = train(model, 4096)
    gc.collect()
    return resident() - before, memory

with warnings.catch_warnings():
    warnings.simplefilter("error")
    grown(1)
    found, memory = grown(8)
    print(json.dumps((found / memory.parameters, memory.total / memory.parameters)))
"""


@pytest.mark.parametrize(
    ("base", "precision", "most"), [("bfloat16", "bf16", 2.1), ("float16", "bf16", 2.1), ("float32", "bf16", 6.1)]
)
@pytest.mark.slow(but="bfloat16-*")
def test_resident_bytes_a_parameter_are_those_of_the_report(base, precision, most):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = _RESIDENT.format(folders=folders, base=base, precision=precision)
    environment = {**os.environ, **_TENSORS_APART}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found, reported = json.loads(done.stdout)
    assert found <= most and abs(found - reported) <= 0.02 * found
