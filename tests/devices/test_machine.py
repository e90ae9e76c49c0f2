"""Machines that come with the package are plausible, and say where each figure is from; files that are none are refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from l2l_compile import Machine, OptionError
from l2l_compile.simulation.machine import names

WITHOUT_SOURCE = {"name", "overlaps", "sources"}
LANE_PEAK = {"Gen3": 1e9, "Gen4": 2e9, "Gen5": 4e9}  # bytes per second of a lane of PCIe, each way
WITHOUT_BF16 = {"t4", "v100"}
MAY_BE_ZERO = {"device_reserve", "host_reserve"}
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
        assert 0 < figure < float("inf") or figure == 0
    assert {name for name, figure in figures.items() if figure == 0} <= MAY_BE_ZERO
    assert machine.flops_share <= 1 and machine.memory_share <= 1
    assert machine.flops_of(torch.float32) <= machine.flops["float32"]


def test_files_of_accelerators_have_the_same_figures():
    """The network is missing where the host is a desktop or an instance of a cloud."""
    network = {"network", "network_latency"}
    kinds = {frozenset(figures_of(Machine.load(name))) - network for name in ACCELERATORS}
    assert len(kinds) == 1
    for name in ACCELERATORS:
        assert len(network & set(figures_of(Machine.load(name)))) in (0, 2), name


@pytest.mark.parametrize("name", ACCELERATORS)
def test_units_of_an_accelerator(name):
    machine = Machine.load(name)
    sixteen = "float16" if name in WITHOUT_BF16 else "bfloat16"
    assert machine.flops[sixteen] >= machine.flops["float32"] >= machine.flops["float64"] >= 1e11
    assert machine.flops[sixteen] < 1e16 and machine.flops["float32"] < 1.5e14  # dense, and without TF32
    assert 1e11 < machine.memory_bandwidth < 1e13 and 1e10 < machine.device_memory < 2e11
    for way in ("h2d", "d2h"):
        ((generation, lanes, peak),) = re.findall(r"PCIe (Gen\d) x(\d+), whose peak is (\d+) GB/s", machine.sources[way])
        assert int(peak) * 1e9 == LANE_PEAK[generation] * int(lanes)
        assert machine.pageable < getattr(machine, way) < int(peak) * 1e9
    assert machine.host_bandwidth < machine.memory_bandwidth and machine.device_memory < machine.host_memory
    assert 1e-6 <= machine.launch <= 1e-4 and 1e-6 <= machine.node <= 1e-3 and 1e-6 <= machine.latency <= 1e-4


@pytest.mark.parametrize("name", ACCELERATORS)
def test_memory_is_that_of_the_driver_less_a_named_reserve(name):
    machine = Machine.load(name)
    assert machine.sources["device_memory"] == f"nvidia-smi: {machine.device_memory / 2**20:.0f} MiB"
    assert "context" in machine.sources["device_reserve"] and 0.5 * 2**30 <= machine.device_reserve <= 2 * 2**30
    assert machine.device_room == machine.device_memory - machine.device_reserve
    assert machine.host_room == machine.host_memory - machine.host_reserve > 0.9 * machine.host_memory


@pytest.mark.parametrize("name", sorted(WITHOUT_BF16))
def test_a_card_without_bf16_says_so_and_names_fp16(name):
    with pytest.raises(OptionError, match=r'no figure for FLOP/s in bfloat16.*precision="fp16"'):
        Machine.load(name).flops_of(torch.bfloat16)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_links_between_devices_are_within_their_source(name):
    machine = Machine.load(name)
    assert machine.devices >= 2 and 1e-6 <= machine.link_latency <= 1e-5
    peak = re.search(r"([\d.]+) GB/s each way", machine.sources["link"])
    assert machine.link == pytest.approx(0.8 * float(peak[1]) * 1e9 if peak else machine.h2d / 2)
    if machine.network is not None:
        count, bits = re.search(r"(\d+) ConnectX-\d of (\d+) Gb/s", machine.sources["network"]).groups()
        assert (
            machine.network == pytest.approx(0.8 * int(count) * int(bits) * 1e9 / 8)
            and machine.network_latency > machine.link_latency
        )


@pytest.mark.parametrize("name", ACCELERATORS)
def test_shares_and_host_figures_are_assumed_or_measured(name):
    """No datasheet has them. Those of hosts are assumed, since hosts differ."""
    sources = Machine.load(name).sources
    assert all(sources[figure].startswith("assumed") for figure in ("host_bandwidth", "host_memory"))
    for figure in (
        "flops_share",
        "memory_share",
        "pageable",
        "latency",
        "launch",
        "node",
        "micro_batch",
    ):
        assert sources[figure].startswith(("assumed, not measured", "measured on")), figure


def test_an_unknown_name_is_refused_with_the_known_names(tmp_path):
    for unknown in ("h300", tmp_path / "missing.json"):
        with pytest.raises(OptionError, match="no machine .*: give the path of a JSON file, or one of .*h100, h200.*rtx4090"):
            Machine.load(unknown)


@pytest.mark.parametrize("given", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "rtx4090"])
def test_a_name_is_found_whatever_its_case_and_spaces(given):
    assert Machine.load(given) == Machine.load("rtx4090")


@pytest.mark.parametrize(
    "given, near", [("5090", "rtx5090"), ("rtx a6000", "a6000"), ("h10O", "h100"), ("A100 80GB SXM", "a100-80gb")]
)
def test_an_unknown_name_is_refused_with_a_near_one(given, near):
    with pytest.raises(OptionError, match=rf"no machine '{given}' \(did you mean '{near}'\?\)"):
        Machine.load(given)


def refusal_of(tmp_path, content) -> str:
    """The message for a file with this content, which names the file and is one sentence."""
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(OptionError) as refused:
        Machine.load(path)
    message = str(refused.value)
    assert message.startswith(f"machine '{path}': ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "the file is not JSON"),
        ("", "the file is not JSON"),
        ("[" * 100_000, "the file is not JSON"),
        ("[1]", "the file holds no figures by name"),
        ('{"speed": 1}', "unknown figures speed; known are d2h, device_memory"),
        ('{"device_memori": 1}', "unknown figures device_memori (did you mean 'device_memory'?)"),
        (
            '{"name": "half"}',
            "these figures are missing: flops (FLOP/s by dtype), memory_bandwidth (a number of bytes per second)",
        ),
    ],
    ids=["cut", "empty", "deep", "a list", "unknown", "nearly known", "missing"],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
    assert message in refusal_of(tmp_path, content)


BAD = {
    "a text": "80GB",
    "NaN": float("nan"),
    "infinite": float("inf"),
    "negative": -1e12,
    "true": True,
    "a list": [1e12],
    "null": None,
    "an object": {},
}
UNITS = {"flops": "FLOP/s", "devices": "a whole number", "flops_share": "a share", "memory_share": "a share"}
UNITS |= dict.fromkeys(("device_memory", "device_reserve", "host_memory", "host_reserve"), "a number of bytes,")
UNITS |= dict.fromkeys(("memory_bandwidth", "h2d", "d2h", "pageable", "host_bandwidth", "link", "network"), "bytes per second")
UNITS |= dict.fromkeys(("latency", "launch", "node", "micro_batch", "link_latency", "network_latency"), "a number of seconds")
OPTIONAL = {"devices", "link", "link_latency", "network", "network_latency"}


@pytest.mark.parametrize("figure", UNITS)
def test_a_figure_that_is_none_of_its_unit_is_refused(tmp_path, figure):
    """Each bad value of each figure: the error names the file, the figure and its unit."""
    good = dataclasses.asdict(Machine.load("h200"))
    for kind, value in BAD.items():
        if value is None and figure in OPTIONAL:
            continue
        message = refusal_of(tmp_path, {**good, figure: value})
        assert f"'{figure}'" in message and UNITS[figure] in message, (kind, message)
    if UNITS[figure] not in ("a number of seconds", "a number of bytes,") or figure in ("device_memory", "host_memory"):
        assert f"'{figure}'" in refusal_of(tmp_path, {**good, figure: 0})


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"device_memory": 24},
            "'device_memory' must be a number of bytes, above 0, such as 25757220864 for 24564 MiB; got 24, which",
        ),
        ({"h2d": 26}, "such as 26e9 for 26 GB/s; got 26, which seems to be in another unit"),
        (
            {"flops": {"bfloat16": 165.2}},
            "'flops: bfloat16' must be FLOP/s, above 0, such as 165.2e12 for 165.2 TFLOP/s; got 165.2, which",
        ),
        ({"flops": {"bf16": 1e12}}, "figures for float32, bfloat16, float16, float64, got the dtype 'bf16'"),
        ({"flops": {"float32": "1e12"}}, "'flops: float32' must be FLOP/s"),
        ({"latency": 10}, "'latency' must be a number of seconds"),
        ({"flops_share": 75}, "'flops_share' must be a share, at most 1"),
        (
            {"device_reserve": 10**12},
            "'device_reserve' is 1,000,000,000,000 bytes, of 'device_memory' 150,754,820,096: nothing is left",
        ),
        ({"name": ""}, "'name' must be a text"),
        ({"name": 3}, "'name' must be a text"),
        ({"overlaps": "no"}, "'overlaps' must be true or false, got 'no'"),
        ({"devices": 2.5}, "'devices' must be a number of devices, a whole number"),
        ({"sources": {"h2d": 1}}, "'sources' must hold a text for each figure"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_figure_in_another_unit_is_refused(tmp_path, changes, message):
    assert message in refusal_of(tmp_path, dataclasses.asdict(Machine.load("h200")) | changes)


def test_a_machine_that_is_changed_is_checked_too():
    with pytest.raises(OptionError, match="machine 'NVIDIA H200 SXM': 'device_memory' must be a number of bytes"):
        dataclasses.replace(Machine.load("h200"), device_memory="80GB")
    with pytest.raises(OptionError, match="nothing is left"):
        dataclasses.replace(Machine.load("h200"), host_memory=2**30)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "other.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="the file is not JSON"):
        Machine.load(tmp_path / "other.json")
    (tmp_path / "folder.json").mkdir()
    for missing in (tmp_path / "folder.json", "x" * 5000 + ".json"):
        with pytest.raises(OptionError, match="no machine "):
            Machine.load(missing)


def test_a_machine_that_is_saved_is_loaded_as_it_was(tmp_path):
    machine = Machine.load("h200")
    machine.save(tmp_path / "mine.json")
    assert Machine.load(tmp_path / "mine.json") == machine
    assert set(json.loads((tmp_path / "mine.json").read_text())) == {f.name for f in dataclasses.fields(Machine)}
