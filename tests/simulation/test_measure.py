"""The figures of this machine are those of a machine: positive, finite, kept by a file. Fits are exact where a figure is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import l2l_compile
from l2l_compile import Machine
from l2l_compile.simulation.clocks import Stopwatch
from l2l_compile.simulation.measure import elementwise_bandwidth, flops, link, link_of
from l2l_compile.simulation.overhead import CallerTime, overhead_of
from models import Stack, rows

HOST = torch.device("cpu")


@pytest.mark.slow
def test_figures_of_the_host(tmp_path):
    state = torch.get_rng_state()
    machine = l2l_compile.measure_machine("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert not machine.overlaps and set(machine.flops) == {"float32", "bfloat16", "float16", "float64"}
    figures = dataclasses.asdict(machine)
    figures = {name: figures[name] for name in figures if figures[name] is not None}  # links between devices are not measured
    numbers = [*machine.flops.values(), *(value for value in figures.values() if isinstance(value, (int, float)))]
    assert all(number > 0 or number is False for number in numbers) and all(map(math.isfinite, numbers))
    assert set(machine.sources) == set(figures) - {"name", "overlaps", "sources"}
    assert machine.flops["float32"] > 1e8 and 1e-7 < machine.launch < machine.node < 1e-2
    assert 2**20 < machine.host_reserve < machine.host_memory and machine.device_room <= machine.host_room * 1.01
    machine.save(tmp_path / "here.json")
    assert Machine.load(tmp_path / "here.json") == machine
    assert l2l_compile.simulate(Stack(2), tmp_path / "here.json", {"micro_batches": 2})(rows(4, dtype=torch.float32)).seconds > 0


class Slow(Stopwatch):
    """Each run takes a second, whatever it does."""

    def once(self, work):
        work()
        return 1.0


def test_figures_are_work_by_seconds():
    assert flops(Slow(), HOST, 8) == dict.fromkeys(("float32", "bfloat16", "float16", "float64"), 2 * 8**3)
    assert elementwise_bandwidth(Slow(), HOST, 4096) == 3 * 4096


def test_a_link_has_a_latency_and_a_bandwidth():
    found = link_of((1000, 2e-6 + 1000 / 5e9), (1_000_000, 2e-6 + 1_000_000 / 5e9))
    assert found.bandwidth == pytest.approx(5e9) and found.latency == pytest.approx(2e-6)
    assert link(Slow(), HOST, HOST, 1 << 20).latency > 0  # two copies that take equally long


def test_overhead_of_nodes_and_rows_adds_up_to_that_of_steps():
    few, many = (
        CallerTime(nodes=100, calls=10, seconds=100 * 3e-5 + 10 * 4e-5),
        CallerTime(nodes=100, calls=80, seconds=100 * 3e-5 + 80 * 4e-5),
    )
    found = overhead_of(few, many)
    assert (found.node, found.micro_batch) == (pytest.approx(3e-5), pytest.approx(4e-5))
