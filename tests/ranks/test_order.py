"""Devices whose lanes are threads with random delays: collectives keep their order, and every wait is there.

`many_seeds.py` runs them with more seeds than the suite has time for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from steps import OPTIONS, assert_same, mean_of_eager, sharded, whole
from test_global import Centered
from test_mean import FLOOR, numbers
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.devices.cpu import CPU
from l2l_compile.devices.registry import KINDS
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Stack

SEEDS = 20
DELAY = 5e-5  # seconds
CHECKED = 10  # every so many seeds, gradients are compared with eager's


@contextmanager
def threads(rank: int, slow: str = "") -> Iterator[list[ThreadedDevice]]:
    """Devices that are opened meanwhile have lanes of their own, with other delays on each rank; or one lane is slow."""
    devices: list[ThreadedDevice] = []

    def opened(device, pinned_memory):
        devices.append(ThreadedDevice(0.0 if slow else DELAY, 1000 * rank, pinned_memory))
        if slow:
            devices[-1].lanes[slow]._queue.delay = 0.04
        return devices[-1]

    KINDS[CPU.name] = dataclasses.replace(CPU, open=opened)
    try:
        yield devices
    finally:
        KINDS[CPU.name] = CPU


def reseed(devices: list[ThreadedDevice], rank: int, seed: int) -> None:
    """Other delays in each step and on each rank. The first step opens the device."""
    for device in devices:
        device.reseed(10_000 * rank + 10 * seed)


def gradients_are_right(rank, world, options, seeds):
    torch.manual_seed(0)
    with threads(rank) as devices:
        eager, model, step = sharded(Stack(3).double(), world, **options)
        for seed in range(seeds):
            reseed(devices, rank, seed)
            model.zero_grad()
            step(numbers(rank, seed)).pow(2).mean().backward()
            if seed % CHECKED == 0:
                losses = [lambda m, r=r, s=seed: m(numbers(r, s)).pow(2).mean() for r in range(world)]
                assert_same(whole(model, gradients=True), mean_of_eager(eager, losses), FLOOR)
    (device,) = devices
    assert device.lanes["comm"] is not device.lanes["compute"]


CASES = [{"prefetch": 2}, {"prefetch": 0, "stash": "device"}]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.slow(only="{'prefetch': 2}")
def test_gradients_are_right_whatever_the_delays(ranks, options):
    ranks.run(gradients_are_right, options, SEEDS, world=3 if options["prefetch"] else 2)


def rows_of_all_ranks_are_right(rank, world, seeds):
    torch.manual_seed(0)
    with threads(rank) as devices:
        eager, model, step = sharded(Centered().double(), world, batch_scope="global", prefetch=2)
        for seed in range(seeds):
            reseed(devices, rank, seed)
            model.zero_grad()
            step(numbers(rank, seed))[0].backward()
            if seed % CHECKED == 0:
                eager.zero_grad()
                eager(torch.cat([numbers(r, seed) for r in range(world)]))[0].backward()
                assert_same(whole(model, gradients=True), {n: p.grad for n, p in eager.named_parameters()}, FLOOR)


@pytest.mark.slow
def test_values_of_all_ranks_are_right_whatever_the_delays(ranks):
    ranks.run(rows_of_all_ranks_are_right, SEEDS)


def trained(rank, world, update):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = l2l_compile.shard(Stack(3), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {**OPTIONS, "optimizer": optimizer, "update": update, "precision": "bf16", "compile_update": False}
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for number in range(8):
        step(numbers(rank, number).float()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(step)
    return whole(model)


def updates_are_as_without_threads(rank, world):
    """16 bits on the link: shards go through a wire."""
    for update in ("in_backward", "in_forward"):
        expected = trained(rank, world, update)
        with threads(rank):
            for name, parameter in trained(rank, world, update).items():
                assert torch.equal(parameter, expected[name]), (update, name)


@pytest.mark.slow
def test_updates_have_the_same_bits_whatever_the_delays(ranks):
    ranks.run(updates_are_as_without_threads)
