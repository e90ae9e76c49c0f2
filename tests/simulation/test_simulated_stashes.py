"""Stashes on a disk in virtual time: each is written and read once, and a slow disk bounds the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from l2l_compile import Machine, OptionError, explain, plan, simulate
from l2l_compile.devices.staging import ring_bytes
from l2l_compile.estimate.optimizer_times import optimizer_times
from l2l_compile.estimate.step_time import step_time
from l2l_compile.host import disk_placement
from l2l_compile.lanes import Lane

CARD = replace(Machine.load("rtx4090"), disk_read=4e9, disk_write=2e9)
WIDTH, LAYERS, ROWS = 1024, 24, 16384
ON_DISK = {"stash": "disk", "disk": "/"}


class Layers(nn.Sequential):
    def forward(self, x):
        return super().forward(x).pow(2).mean()


def step(machine=CARD, **options):
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Layers(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        x = torch.empty(ROWS, WIDTH)
    if "update" in options:
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    given = {"micro_batches": 4, "precision": "bf16", **options}
    return simulate(model, machine, given)(x), explain(model, {**given, "device": "cpu"})(x).on(machine)


def test_each_stash_is_written_and_read_once():
    found, report = step(**ON_DISK)
    stored = report.host_memory.disk_stashes
    assert stored == found.stats.disk_stash_bytes > 18 * ROWS * WIDTH * 2
    assert found.timeline.busy(Lane.DISK_WRITE) == pytest.approx(stored / CARD.disk_write, rel=1e-6)
    assert found.timeline.busy(Lane.DISK_READ) == pytest.approx(stored / CARD.disk_read, rel=1e-6)


@pytest.mark.parametrize("machine", [CARD, replace(Machine.load("cpu"), disk_read=4e9, disk_write=2e9)], ids=["card", "host"])
def test_a_fast_disk_costs_nothing_and_a_slow_one_its_time(machine):
    fast, slow = (replace(machine, disk_read=rate, disk_write=rate) for rate in (1e15, 1e7))
    without, _ = step(machine)
    with_a_fast_one, _ = step(fast, **ON_DISK)
    assert with_a_fast_one.seconds == pytest.approx(without.seconds, rel=0.02)
    found, report = step(slow, **ON_DISK)
    disk = 2 * report.host_memory.disk_stashes / 1e7
    assert disk <= found.seconds < 1.1 * disk
    assert found.stats.disk_stash_wait_seconds == pytest.approx(disk, rel=0.1)


def test_host_memory_in_virtual_time_is_that_of_the_report():
    """With a disk that is slower than the step, so that all buffers are in use. Without it, all stashes are there at once."""
    slow = replace(CARD, disk_read=2e8, disk_write=2e8)
    updates = {"update": "in_backward"}
    (found, report), (without, plain) = step(slow, **ON_DISK, **updates, host_memory="1TB"), step(slow, **updates)
    counted, all_stashes = report.host_memory, plain.host_memory.stashes
    print(found.taken_bytes, without.taken_bytes, counted)
    assert counted.disk_stashes == all_stashes and counted.stashes == 0
    assert without.taken_bytes > all_stashes
    assert found.taken_bytes <= counted.total - counted.master - counted.optimizer_state + ring_bytes(None)


def test_updates_lose_the_time_of_stashes(monkeypatch):
    """One disk does both: forward writes stashes, and backward reads them and what updates need, if none goes on in forward."""
    monkeypatch.setattr(disk_placement, "_LATE", 0.0)
    slow = replace(CARD, disk_read=5e8, disk_write=5e8)
    found, report = step(slow, **ON_DISK, update="in_backward", host_memory="400MB")
    assert report.host_memory.disk.placement.on_disk == found.stats.disk_read_bytes > 0
    assert found.seconds >= 0.97 * (2 * found.stats.disk_stash_bytes + found.stats.disk_read_bytes) / 5e8


def test_stashes_over_several_folders_take_less_time():
    """Each folder is a disk of its own: two are as fast as one disk of twice the rate."""
    slow, faster = (replace(CARD, disk_read=rate, disk_write=rate) for rate in (2e8, 4e8))
    of_one, of_two = (step(machine, **{**ON_DISK, "disk": disk})[0] for machine, disk in ((faster, "/a"), (slow, ["/a", "/b"])))
    assert of_two.seconds == of_one.seconds < 0.6 * step(slow, **ON_DISK)[0].seconds


BY_NODES = [  # read and write rates, and options
    (1e15, 1e15, {}),
    (1e9, 1e8, {}),
    (4e9, 2e9, {"micro_batches": 1}),
    (1e8, 1e9, {"micro_batches": 7}),
    (5e8, 5e8, {"prefetch": 0}),
    (1e9, 1e8, {"prefetch": 2}),
    (4e9, 2e9, {"keep": "20MB"}),
    (5e8, 5e8, {"update": "in_backward", "host_memory": "250MB"}),
    (1e9, 1e8, {"update": "in_forward", "host_memory": "400MB"}),
    (1e8, 1e9, {"update": "in_forward", "delay": 1, "host_memory": "500MB"}),
]


def _said(value):
    return f"{value:.0e}" if isinstance(value, float) else ", ".join(f"{k}={v}" for k, v in value.items()) or "default"


@pytest.mark.parametrize("name", ["rtx4090", "cpu"])
@pytest.mark.parametrize(("read", "write", "options"), BY_NODES, ids=_said)
@pytest.mark.slow(but=("*prefetch=0-rtx4090", "*in_backward, *-rtx4090", "*delay=1, *-cpu"))
def test_nodes_take_as_long_as_a_simulated_step(read, write, options, name):
    machine = replace(Machine.load(name), disk_read=read, disk_write=write)
    found, report = step(machine, **ON_DISK, **options)
    assert report.host_memory.disk_stashes > 0
    times = optimizer_times(nn.Linear(1, 1), report.options, machine)
    by_nodes = step_time(report.programs, report.options, machine, report.levels, times, disk=report.host_memory.disk)
    assert by_nodes.steady == found.steady
    assert by_nodes.seconds == pytest.approx(found.seconds, rel=2e-3)


def test_a_plan_stores_stashes_where_the_host_has_no_room():
    """A disk wears out: with room on the host, no stash is on it."""
    roomy, narrow = (
        replace(CARD, host_memory=size, device_memory=400 << 20, device_reserve=0, host_reserve=0)
        for size in (64 << 30, 300 << 20)
    )
    with torch.device("meta"):
        model, x = Layers(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))), torch.empty(ROWS, WIDTH)
    fixed = {"micro_batches": 4, "prefetch": 1, "update": "in_backward", "keep": 0, "keep_on_host": 0, "resident": 0}
    options = {"disk": "/", "precision": "bf16", **fixed}
    optimizer = torch.optim.AdamW(model.parameters())
    (best, *_), (least, *_) = (plan(model, m, options, optimizer=optimizer)(x).plans for m in (roomy, narrow))
    print(best, least)
    assert best.options["stash"] != "disk" == least.options["stash"]


def test_a_machine_without_a_disk_is_refused():
    with pytest.raises(OptionError, match="has no figure 'disk_read', which this simulation needs"):
        step(replace(CARD, disk_read=None), **ON_DISK)
