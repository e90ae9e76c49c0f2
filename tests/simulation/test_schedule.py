"""What a schedule hides, in virtual time: a step takes little more than the work of its compute lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile import Machine, simulate
from l2l_compile.host.updates.in_forward import UpdatesInForward
from l2l_compile.simulation.simulated_device import SimulatedDevice

WIDTH, ROWS = 256, 512


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Layers(nn.Module):
    """Equal layers, a loss behind them."""

    def __init__(self, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PARAMETERS = 8 * WIDTH * WIDTH + 5 * WIDTH  # of a layer
FLOPS = 2 * PARAMETERS * ROWS  # of a layer's forward
SECOND = 1.0  # that a layer's forward takes


def machine(**figures: float) -> Machine:
    """A machine on which a layer's forward takes a second, its weights cross the link in half of that, and launches are free."""
    link = 2 * 4 * PARAMETERS / SECOND
    given = {
        "memory_bandwidth": 1e15,
        "device_memory": 1e12,
        "h2d": 4 * link,
        "d2h": 4 * link,
        "pageable": link,
        "host_bandwidth": 40 * link,
        "host_memory": 1e12,
        "latency": 0.0,
        "launch": 0.0,
        "node": 0.0,
        **figures,
    }
    return Machine("test", flops={"float32": FLOPS / SECOND, "bfloat16": FLOPS / SECOND}, **given)


def step_over_compute(on: Machine, depth: int = 12, **options) -> float:
    model = Layers(depth)
    if "update" in options:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), fused=True)
    found = simulate(model, on, {"micro_batches": 4, **options})(torch.empty(ROWS, WIDTH))
    return found.seconds / found.timeline.busy("compute")


@pytest.mark.parametrize("options", [{}, {"update": "in_backward"}, {"update": "in_forward", "max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow(but=("fp32-{'update': 'in_backward'}", "bf16-{'update': 'in_forward'*"))
def test_copies_and_updates_are_hidden(options, precision):
    assert step_over_compute(machine(), precision=precision, **options) < 1.06


def test_staging_on_the_callers_thread_hides_behind_launches(monkeypatch):
    """In fp32, weights go through the ring of page-locked buffers."""
    slow = machine(host_bandwidth=2 * 2 * 4 * PARAMETERS / SECOND)  # half a second to stage a layer
    hidden = step_over_compute(slow, depth=4)
    monkeypatch.setattr(SimulatedDevice, "launches_first", False)
    assert step_over_compute(slow, depth=4) > hidden + 0.02


def test_the_first_update_waits_for_the_last_norm_alone(monkeypatch):
    slow = machine(host_bandwidth=10 * 4 * PARAMETERS / SECOND)
    options = {"update": "in_forward", "max_grad_norm": 1.0, "precision": "bf16"}
    hidden = step_over_compute(slow, **options)
    monkeypatch.setattr(UpdatesInForward, "_norm_of", _all_at_once)
    assert step_over_compute(slow, **options) > hidden + 0.03


def _all_at_once(updates, gradients, known):
    return torch.nn.utils.get_total_norm([updates._norm_of_one(p, g) for p, g in gradients.items()])


def test_updates_as_long_as_a_step_are_hidden_with_a_delay():
    """They take 0.9 of the work of the device: more than a forward, and more than a backward."""
    machine_ = machine(host_bandwidth=28 * PARAMETERS / (0.9 * 3 * SECOND))
    options = {"update": "in_forward", "precision": "bf16"}
    assert step_over_compute(machine_, **options) > 1.3
    assert step_over_compute(machine_, **options, delay=1) < 1.06


def test_the_host_has_time_for_updates_if_the_device_takes_norms(monkeypatch):
    slow = machine(host_bandwidth=11 * 4 * PARAMETERS / SECOND)
    options = {"update": "in_backward", "precision": "bf16"}
    hidden = step_over_compute(slow, **options)
    monkeypatch.setattr(SimulatedDevice, "takes_norms", False)
    assert step_over_compute(slow, **options) > hidden
