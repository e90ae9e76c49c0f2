"""The report of the host's memory."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch

import l2l_compile
from l2l_compile.estimate.host_memory import HostMemory
from l2l_compile.host.wire import Wire
from l2l_compile.session import session_of
from models import Shared, Stack, compiled, rows


def bytes_a_parameter(**options):
    model = Stack(8, width=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = l2l_compile.explain(model, {"device": "cpu", "optimizer": optimizer, **options})(
        rows(4, dtype=torch.float32)
    ).host_memory
    assert found.parameters == sum(p.numel() for p in model.parameters())
    return found, (found.of_parameters - found.ring) / found.parameters


@pytest.mark.parametrize(
    "options, least, most",
    [
        ({}, 16.0, 16.01),  # 4 master, 4 gradients, 8 state
        ({"precision": "bf16"}, 16.0, 16.2),  # 2 of the wire, in the memory of gradients
        ({"precision": "bf16", "update": "in_forward"}, 16.0, 16.2),
    ],
)
def test_bytes_a_parameter(options, least, most):
    assert least <= bytes_a_parameter(**options)[1] <= most


def test_page_locked_memory_is_told_with_what_it_is_part_of():
    """The staging buffers are beside the sum, and the rest is in it."""
    memory = HostMemory(1 << 20, 4 << 20, 2 << 20, 0, 0, None, pinned=3 << 20, shared=0)
    assert str(memory).endswith("in all 6.0 MiB; 3.0 MiB of these and of staging buffers beside them are page-locked")


def test_in_backward_gradients_are_those_of_a_few_segments():
    found, _ = bytes_a_parameter(precision="bf16", update="in_backward")
    assert found.gradients == 0 and 14.0 <= (found.of_parameters - found.ring) / found.parameters <= 14.2
    assert 0 < found.ring <= 3.1 * 2 * 2 * 128 * 2 * 128  # three segments, of two matrices 128 x 256, two bytes an entry


def test_the_report_prints_it():
    report = l2l_compile.explain(Stack(), {"device": "cpu"})(rows(4, dtype=torch.float32))
    assert "host memory (bytes a parameter): master" in str(report)
    assert report.host_memory.optimizer_state is None


def test_at_step_a_wire_is_where_gradients_were():
    """Gradients that are gone make room for the wires of the next forward, which make room for gradients in backward."""
    model = Stack(4, width=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, precision="bf16", optimizer=optimizer)
    in_forward, in_backward = [], []

    def leases() -> set[int]:
        """The addresses of the buffers in use."""
        pool = session_of(step).server._memory._pool
        pool._take_back()
        return set(pool._leased)

    for _ in range(3):
        output = step(rows(4, dtype=torch.float32)).sum()
        in_forward.append(leases())
        output.backward()
        del output
        in_backward.append(leases())
        optimizer.step()
        optimizer.zero_grad()
        assert not leases()
    assert len(in_forward[2]) >= 4 and in_backward[2]
    assert len(in_forward[2] | in_backward[2]) <= len(in_forward[2]) + 2  # a gradient before its wire is gone, for two sizes


def test_layers_that_share_weights_are_cast_twice_a_step(monkeypatch):
    """Once for forward and all of backward where the wire stays there until its last layer."""
    made = []
    make = Wire.__init__
    monkeypatch.setattr(Wire, "__init__", lambda self, *a, **k: (made.append(self), make(self, *a, **k))[1])
    model = Shared(4)
    step = compiled(model, precision="bf16", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    segments = 0
    for _ in range(2):
        step(rows(4, dtype=torch.float32)).sum().backward()
        segments = segments or len(made)
    assert segments <= len({s.parameter_names for p in l2l_compile.programs(step) for s in p.segments if s.parameter_names})
    assert len(made) == 2 * segments  # all anew in the next forward, none in backward


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_step_gives_the_free_heap_back_first():
    """Pages between buffers that stay, which the heap would keep."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer)
    step(rows(4, dtype=torch.float32)).sum().backward()
    buffers = [bytearray(50_000) for _ in range(4000)]  # 190 MiB, of a size that is not mapped on its own
    kept = buffers[::100]
    del buffers
    before = resident()
    optimizer.step()
    assert resident() < before - (100 << 20) and kept


def resident() -> int:
    """Bytes of this process in memory."""
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
