"""The memory that a report counts on a machine is the memory that a simulated step takes there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile import Machine, explain, simulate
from models import Stack, rows


def of_a_machine(**options):
    """A report on a machine, and a simulated step there."""
    model, machine = Stack(6, width=64), Machine.load("h200")
    if options.get("update", "at_step") != "at_step":
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen, x = {"micro_batches": 4, **options}, rows(8, dtype=torch.float32)
    report = explain(model, {**chosen, "device": "cpu"})(x).on(machine)
    return report, simulate(model, machine, chosen)(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 0},
        {"prefetch": 3, "micro_batches": 1},
        {"stash": "device"},
        {"precision": "bf16", "update": "in_forward"},
        {"precision": "fp16", "update": "in_forward", "outputs": "loss"},
        {"update": "in_backward"},
    ],
)
def test_device_peak_of_a_report_is_that_of_a_simulated_step(options):
    report, step = of_a_machine(**options)
    norms = 4 * len(list(Stack(6).parameters()))  # of gradients, a number each: not counted
    assert 0 <= step.peak_device_bytes - report.device_memory.peak <= norms


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_memory_of_a_report_covers_a_simulated_step(update, precision):
    report, step = of_a_machine(update=update, precision=precision)
    memory = report.host_memory
    besides = memory.total - memory.master - (memory.optimizer_state or 0)
    staging = 33 << 20  # the ring of page-locked buffers, whatever the model's size
    assert memory.stashes > 0 and step.taken_bytes - staging <= besides


def test_slabs_are_counted_on_a_device_with_its_own_memory():
    """The last layer is the largest, and the slab beside it is as large."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 2048))
    report = explain(model, {"device": "cpu", "micro_batches": 4})(rows(8, 64, dtype=torch.float32))
    largest = 4 * (64 * 2048 + 2048)
    assert report.on(Machine.load("h200")).device_memory.weights == 2 * largest
    assert report.on(Machine.load("cpu")).device_memory.weights == largest + 4 * (64 * 64 + 64)
