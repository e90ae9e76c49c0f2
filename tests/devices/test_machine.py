"""Machines that come with the package are plausible, and say where each figure is from; files that are none are refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from l2l_compile import Machine, OptionError
from l2l_compile.devices.machine import names

WITHOUT_SOURCE = {"name", "overlaps", "sources"}
LINK_PEAK = {"Gen3": 16e9, "Gen4": 32e9, "Gen5": 64e9}  # bytes per second of 16 lanes of PCIe, each way
ACCELERATORS = [name for name in names() if Machine.load(name).overlaps]


def figures_of(machine):
    """Those that it has, with a source."""
    figures = {f.name: getattr(machine, f.name) for f in dataclasses.fields(machine) if f.name not in WITHOUT_SOURCE}
    return {name: figure for name, figure in figures.items() if figure is not None}


@pytest.mark.parametrize("name", names())
def test_every_figure_is_positive_and_has_a_source(name):
    machine = Machine.load(name)
    figures = figures_of(machine)
    assert set(machine.sources) == set(figures) and all(machine.sources.values())
    for figure in (*machine.flops.values(), *(value for name, value in figures.items() if name != "flops")):
        assert 0 < figure < float("inf")
    assert machine.flops_share <= 1 and machine.memory_share <= 1
    assert machine.flops_of(torch.float32) <= machine.flops["float32"]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_units_of_an_accelerator(name):
    machine = Machine.load(name)
    assert machine.flops["bfloat16"] >= machine.flops["float32"] >= machine.flops["float64"] >= 1e11
    assert machine.flops["bfloat16"] < 1e16 and machine.flops["float32"] < 1e14  # dense, and without TF32
    assert 1e11 < machine.memory_bandwidth < 1e13 and 1e10 < machine.device_memory < 2e11
    for way in ("h2d", "d2h"):
        (generation,) = re.findall(r"PCIe (Gen\d) x16", machine.sources[way])
        assert machine.pageable < getattr(machine, way) < LINK_PEAK[generation]
    assert machine.host_bandwidth < machine.memory_bandwidth and machine.device_memory < machine.host_memory
    assert 1e-6 <= machine.launch <= 1e-4 and 1e-6 <= machine.node <= 1e-3 and 1e-6 <= machine.latency <= 1e-4


@pytest.mark.parametrize("name", ACCELERATORS)
def test_links_between_devices_are_within_the_peak_of_their_source(name):
    machine = Machine.load(name)
    assert machine.devices >= 2 and 1e-6 <= machine.link_latency <= 1e-5
    peak = re.search(r"(\d+) GB/s each way", machine.sources["link"])
    assert machine.link == pytest.approx(0.8 * int(peak[1]) * 1e9 if peak else machine.h2d / 2)
    if machine.network is not None:
        count, bits = re.search(r"(\d+) ConnectX-7 of (\d+) Gb/s", machine.sources["network"]).groups()
        assert (
            machine.network == pytest.approx(0.8 * int(count) * int(bits) * 1e9 / 8)
            and machine.network_latency > machine.link_latency
        )


@pytest.mark.parametrize("name", ACCELERATORS)
def test_shares_and_host_figures_count_as_assumed(name):
    sources = Machine.load(name).sources
    for figure in (
        "flops_share",
        "memory_share",
        "pageable",
        "latency",
        "host_bandwidth",
        "host_memory",
        "launch",
        "node",
        "micro_batch",
    ):
        assert sources[figure].startswith("assumed"), figure


def test_an_unknown_name_is_refused_with_the_names_that_there_are(tmp_path):
    for unknown in ("h300", tmp_path / "missing.json"):
        with pytest.raises(OptionError, match="no machine .*: give the path of a JSON file, or one of .*h100, h200.*rtx4090"):
            Machine.load(unknown)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "the file is not JSON"),
        ("[1]", "the file holds no figures by name"),
        ('{"speed": 1}', "unknown figures speed; known are d2h, device_memory"),
        ('{"name": "half"}', "missing .* required positional arguments: 'flops'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=rf"machine '.*machine\.json': .*{message}"):
        Machine.load(path)


def test_a_machine_that_is_saved_is_loaded_as_it_was(tmp_path):
    machine = Machine.load("h200")
    machine.save(tmp_path / "mine.json")
    assert Machine.load(tmp_path / "mine.json") == machine
    assert set(json.loads((tmp_path / "mine.json").read_text())) == {f.name for f in dataclasses.fields(Machine)}
