"""After the first steps of equal shape, steps take no more memory for slabs, wires, stashes and gradients.

How many gradients are on their way at once depends on which thread is ahead, so a later step may be the first that needs one
more buffer. That can happen as often as a step has gradients, and never again.
"""

from __future__ import annotations

import os

import pytest
import torch

from l2l_compile.devices.device import Device
from l2l_compile.devices.host import half_of_the_cores
from l2l_compile.memory import pages
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Stack, compiled

WAYS = {
    "no optimizer": {},
    "at_step": {"update": "at_step"},
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward", "max_grad_norm": 0.1},
    "delay": {"update": "in_forward", "delay": 1},
    "one row at a time, stashes on the device": {"micro_batches": 6, "stash": "device"},
}
MOST_STEPS = 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_stop_taking_memory(threaded, monkeypatch, way, precision):
    threaded.delay = 0.0
    model = Stack(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = {"optimizer": optimizer} if "update" in WAYS[way] else {}
    step = compiled(model, precision=precision, compile_update=False, **WAYS[way], **chosen)
    taken: list[str] = []
    take = pages.PinnedMemory.take
    monkeypatch.setattr(
        pages.PinnedMemory, "take", lambda memory, size, purpose: taken.append(purpose) or take(memory, size, purpose)
    )
    per_step, slabs = [], []
    while len(per_step) < 5 or (any(per_step[-3:]) and len(per_step) < MOST_STEPS):
        taken.clear()
        step(torch.randn(6, 5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        per_step.append(list(taken))
        slabs.append([slab.data_ptr() for slab in session_of(step).device.slabs])
    assert per_step[0] and not any(per_step[-3:]), per_step
    assert slabs[1] == slabs[-1]


def test_threads_of_the_host_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7, 8})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert half_of_the_cores() == 2 and Device.host_threads(ThreadedDevice(0.0)) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert half_of_the_cores() == 32 and Device.host_threads(ThreadedDevice(0.0)) == 56
