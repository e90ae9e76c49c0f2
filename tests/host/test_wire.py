"""A wire is sent part by part, as it is copied from the parameters: the first part crosses the link while the next one is copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile.host import wire as wires
from l2l_compile.host.wire import Wires
from l2l_compile.memory.pages import PinnedMemory, unlocked
from models import Stack, compiled, pair_of, rows

PARAMETERS = {
    "a matrix": lambda: [torch.randn(64, 40)],
    "several": lambda: [torch.randn(3, 5), torch.randn(7), torch.randn(50, 30), torch.randn(2, 3, 4, 5)],
    "a number, and nothing": lambda: [torch.randn(()), torch.randn(0, 4), torch.randn(4, 0), torch.randn(9)],
    "other strides": lambda: [torch.randn(6, 40).t(), torch.randn(2, 8, 5, 3).to(memory_format=torch.channels_last)],
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(wires, "CHUNK", 256)


class Slab:
    """Takes the bytes of a wire when they are said to be ready."""

    def __init__(self):
        self.memory, self.end, self.chunks = torch.empty(0), 0, 0

    def __call__(self, wire, start, end):
        self.memory = self.memory if self.end else torch.zeros_like(wire.buffer)
        assert start == self.end
        self.memory[start:end] = wire.buffer[start:end]
        self.end, self.chunks = end, self.chunks + 1


@pytest.mark.parametrize("make", PARAMETERS.values(), ids=PARAMETERS)
def test_each_chunk_is_up_to_date_when_it_is_sent(make):
    parameters, loaded = [nn.Parameter(p) for p in make()], Wires(unlocked())
    dtypes = [torch.bfloat16 if p.dim() > 1 else torch.float32 for p in parameters]
    for turn in range(3):
        with torch.no_grad():
            for p in parameters:
                p.add_(turn)
        loaded.begin_forward()
        first, again = Slab(), Slab()
        wire = loaded.load(parameters, dtypes, ready=first)
        assert first.end == wire.buffer.numel()
        expected = [p.detach().to(dtype) for p, dtype in zip(parameters, dtypes, strict=True)]
        assert all(map(torch.equal, wire.in_slab(first.memory), expected))
        loaded.load(parameters, dtypes, ready=again)
        assert again.chunks == 1 and again.end == first.end  # there is nothing to copy
        assert first.chunks > 1 or first.end < 2 * wires.CHUNK


@pytest.mark.parametrize("stored", ["pinned", "in memory that gradients take"])
@pytest.mark.slow(only="pinned")
def test_parity_where_every_wire_is_sent_in_chunks(threaded, stored, monkeypatch):
    model = Stack(3, width=24)
    if stored != "pinned":
        monkeypatch.setattr(PinnedMemory, "has_room", lambda self, size: False)
    pair = pair_of(model, tolerance=3e-2, precision="bf16")
    whole, found = compiled(model, precision="bf16"), []
    for _ in range(2):
        x = rows(6, dtype=torch.float32)
        pair.step(x).check()
        for size in (256, 1 << 30):
            monkeypatch.setattr(wires, "CHUNK", size)
            model.zero_grad()
            whole(x).sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(map(torch.equal, found[-1], found[-2]))
