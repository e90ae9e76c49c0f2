"""A disk in virtual time: chunks pass a ring of buffers, and the step is bounded by the disk or by the step without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from l2l_compile import Machine, OptionError, explain, plan, simulate
from l2l_compile.estimate.optimizer_times import optimizer_times
from l2l_compile.estimate.step_time import step_time
from l2l_compile.host.disk_plan import disk_plan
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.simulation.simulated_device import Clock, Clocks
from l2l_compile.simulation.simulated_disk import DiskRing, chunks
from marked_tables import assert_written
from stored_training import OPTIMIZERS, RING

ROOT = Path(__file__).parents[2]
CARD = replace(Machine.load("rtx4090"), disk_read=4e9, disk_write=2e9)
WIDTH, LAYERS, ROWS = 1024, 32, 4096
BY_NODES = 0.001
DELAYED = {"update": "in_forward", "delay": 1}
BY_TURNS = {"update": "in_forward", "schedule": "1f1b"}
MODES = {"in_backward": {"update": "in_backward"}, "in_forward": {"update": "in_forward"}, "delayed": DELAYED, "1f1b": BY_TURNS}


class Layers(nn.Sequential):
    """A stack that makes its loss."""

    def forward(self, x):
        return super().forward(x).pow(2).mean()


class ByTurns(nn.Sequential):
    """One with a loss of which each micro-batch can go back by itself, also in 16 bits."""

    def forward(self, x):
        return nn.functional.cross_entropy(super().forward(x), x.argmax(-1))


def step(machine, optimizer="adamw", disk="/", stored_copies=False, part=0.15, **options):
    """`part` is the host memory, of that for copies, that is left for state or gradients."""
    torch._dynamo.reset()
    with torch.device("meta"):
        kind = ByTurns if "schedule" in options else Layers
        model = kind(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))
        x = torch.empty(ROWS, WIDTH)
    given = {"precision": "bf16", "optimizer": OPTIMIZERS[optimizer](model.parameters()), "micro_batches": 2, **options}
    if disk:
        asked = Options.build({**given, "disk": disk, "host_memory": "1TB", "device": "cpu"})
        plan = disk_plan(asked, largest=WIDTH**2)
        least = plan.beside if stored_copies else (1 + part) * (plan.beside + sum(size.copy for size in plan.sizes))
        given |= {"disk": disk, "host_memory": int(max(least + RING, least * 8 / 7 + 2**20))}  # the ring takes an eighth
    report = explain(model, {**given, "device": "cpu"})(x).on(machine)
    found, plan = simulate(model, machine, given)(x), report.host_memory.disk
    if optimizer == "adamw":
        times = optimizer_times(model, report.options, machine)
        by_nodes = step_time(report.programs, report.options, machine, report.levels, times, disk=plan)
        assert by_nodes.seconds == pytest.approx(found.seconds, rel=BY_NODES)
    return found, plan


@pytest.mark.parametrize("mode", MODES)
def test_a_step_reads_and_writes_what_is_on_disk_once(mode):
    found, plan = step(CARD, **MODES[mode])
    assert plan is not None and plan.placement.on_disk > 0.7 * 12 * LAYERS * WIDTH**2
    assert found.stats.disk_read_bytes == found.stats.disk_written_bytes == plan.placement.on_disk
    for lane, rate in ((Lane.DISK_READ, CARD.disk_read), (Lane.DISK_WRITE, CARD.disk_write)):
        assert found.timeline.busy(lane) == pytest.approx(plan.placement.on_disk / rate, rel=0.05)
    assert found.steady


@pytest.mark.parametrize("slower", [0.1, 1, 10, 100])
def test_late_updates_take_the_longer_of_step_and_disk(slower):
    machine = replace(CARD, disk_read=CARD.disk_read / slower, disk_write=CARD.disk_write / slower)
    found, plan = step(machine, **DELAYED)
    without, _ = step(machine, disk=False, **DELAYED)
    assert found.seconds == pytest.approx(max(without.seconds, plan.placement.on_disk / machine.disk_write), rel=0.02)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_fast_disk_costs_nothing_and_a_slow_one_its_time(mode, optimizer):
    fast, slow = (replace(CARD, disk_read=rate, disk_write=rate) for rate in (1e15, 1e7))
    """In backward, the fast one is a gain: some updates go on in forward."""
    without, _ = step(CARD, optimizer, disk=False, **MODES[mode])
    with_fast, plan = step(fast, optimizer, **MODES[mode])
    if plan.late:
        assert mode == "in_backward" and 0.8 * without.seconds < with_fast.seconds < without.seconds
    else:
        assert with_fast.seconds == pytest.approx(without.seconds, rel=1e-3)
    found, plan = step(slow, optimizer, **MODES[mode])
    assert found.seconds >= 0.99 * plan.placement.on_disk / 1e7


def test_late_updates_use_the_disk_in_forward():
    """At a disk that takes as long as the step: without room for gradients that wait, it is idle in forward."""
    without, _ = step(CARD, disk=False, update="in_backward")
    on_disk = step(CARD, part=0, update="in_backward")[1].placement.on_disk
    balanced = replace(CARD, disk_read=on_disk / without.seconds, disk_write=on_disk / without.seconds)
    (tight, without_room), (roomy, with_room) = (step(balanced, part=part, update="in_backward") for part in (0, 0.3))
    assert not without_room.late and with_room.late
    assert roomy.seconds < 1.1 * without.seconds < 1.2 * without.seconds < tight.seconds


@pytest.mark.parametrize("mode", MODES)
def test_folders_are_as_fast_as_one_disk_of_their_rates(mode):
    """Of copies and parameters, by nodes and by the executor."""
    faster, options = replace(CARD, disk_read=3 * CARD.disk_read, disk_write=3 * CARD.disk_write), MODES[mode]
    stored_copies = "delay" not in options
    of_one, _ = step(faster, stored_copies=stored_copies, **options)
    of_three, plan = step(CARD, disk=["/a", "/b", "/c"], stored_copies=stored_copies, **options)
    assert plan.disks == 3 and of_three.seconds == of_one.seconds
    assert of_three.seconds < 0.6 * step(CARD, stored_copies=stored_copies, **options)[0].seconds


def test_a_machine_without_a_disk_is_refused():
    with pytest.raises(OptionError, match="has no figure 'disk_read', which this simulation needs"):
        step(replace(CARD, disk_read=None), update="in_backward")


@pytest.mark.parametrize("mode", ["in_backward", "in_forward"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("slower", [0.01, 1, 100])
def test_fetches_from_the_disk_take_its_time(mode, precision, slower):
    """Of copies in 16 bits, or of parameters. All of them are on disk; the last two layers stay in their slabs for backward."""
    machine = replace(CARD, disk_read=CARD.disk_read / slower, disk_write=CARD.disk_write / slower)
    found, plan = step(machine, stored_copies=True, precision=precision, **MODES[mode])
    width = 2 if precision == "bf16" else 4
    assert found.stats.disk_fetched_bytes == (2 * LAYERS - 2) * WIDTH**2 * width
    assert plan.copies == (LAYERS * WIDTH**2 * 2 if precision == "bf16" else 0)
    read = (found.stats.disk_fetched_bytes + found.stats.disk_read_bytes) / machine.disk_read
    assert found.timeline.busy(Lane.DISK_READ) == pytest.approx(read, rel=0.05), "of fetches and updates, each once"
    assert found.seconds >= max(read, found.stats.disk_written_bytes / machine.disk_write) * (0.95 if slower == 100 else 0)


def test_weights_that_a_processor_reads_are_not_timed():
    with pytest.raises(OptionError, match="through the page cache, whose time is not known to a simulation"):
        step(replace(Machine.load("cpu"), disk_read=1e9, disk_write=1e9), update="in_backward", precision="fp32")


def test_a_schedule_without_a_flush_is_not_timed():
    with pytest.raises(OptionError, match="not timed in a schedule without a flush"):
        step(CARD, **DELAYED, schedule="1f1b")


def test_a_plan_of_several_devices_with_a_disk_is_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(OptionError, match="does not know how much of the model each rank has on disk: plan one device"):
        plan(model, CARD, {"disk": "/"}, devices=2, optimizer=OPTIMIZERS["adamw"](model.parameters()))(torch.empty(4, 8))


def ring(count):
    clocks = Clocks(replace(CARD, disk_read=1.0, disk_write=0.5))
    clocks.thread = Clock(Lane.HOST)
    return clocks, DiskRing(clocks, 10, count)


def test_chunks_wait_for_reads_and_for_free_buffers():
    """Reads of 2 s, updates of 1 s and writes of 4 s, in two buffers: by hand."""
    clocks, disk = ring(2)
    disk.begin()
    for _ in range(3):
        disk.update(2, 1.0)
    # read 0-2, update 2-3, write 3-7; read 3-5 (when it is asked for), update 5-6, write 7-11; the first buffer is free at 7: read 7-9, 9-10
    assert clocks.thread.now == 10 and disk._writing.now == 15
    disk.finish()
    assert clocks.thread.now == 15
    disk.begin()  # one buffer is for a chunk that comes out of order: one is read ahead, 15-17
    disk.update(2, 1.0)  # 17-18, written 18-22; the other buffer is free: the next one was begun behind the first, 18-20
    assert clocks.thread.now == 18
    disk.update(2, 1.0)
    assert clocks.thread.now == 21 and (disk.read, disk.written) == (12, 10)  # one is read ahead


def test_parameters_share_chunks_and_are_cut_into_them():
    assert list(chunks([(3, 3.0), (4, 8.0), (0, 0.0)], 5)) == [(5, 7.0), (2, 4.0)]
    assert list(chunks([(12, 6.0)], 5)) == [(5, 2.5), (5, 2.5), (2, 1.0)]


def test_the_table_of_simulated_disks_is_that_of_the_run():
    rows = json.loads((ROOT / "examples" / "benchmarks" / "runs" / "disk-simulated.json").read_text())["rows"]
    lines = [
        "| update | `host_memory` | disk, each way | step | without disk | disk alone | step over the longer | written |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = " | ".join(f"{row[name]:.2f} s" for name in ("step s", "without disk s", "disk alone s"))
        lines.append(
            f"| {row['update']} | {row['host_memory']} | {row['GB/s each way']:g} GB/s | {seconds} "
            f"| {row['over the longer']:.3f} | {row['GB written']:.0f} GB |"
        )
    assert_written(ROOT / "docs" / "disk.md", "disk: simulated", "\n".join(lines))


def test_the_table_of_slowed_disks_is_that_of_the_run():
    rows = json.loads((ROOT / "examples" / "benchmarks" / "runs" / "disk.json").read_text())["rows"]
    lines = [
        "| update | disk alone over step | without disk | with disk | over the longer | processor of the host side, s/GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = " | ".join(f"{row[name]:.2f} s" for name in ("without s", "with s"))
        lines.append(
            f"| {row['update']} | {row['disk alone over step']} | {seconds} | {row['over the longer']} | {row['host side s/GB']:.3f} |"
        )
    assert_written(ROOT / "docs" / "disk.md", "disk: measured", "\n".join(lines))
