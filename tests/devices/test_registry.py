"""A device resolves by name: what a new kind needs is an entry in the registry."""

from __future__ import annotations

import pytest
import torch

import l2l_compile
from l2l_compile import OptionError, Options
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.devices.device import DeviceKind
from l2l_compile.devices.registry import KINDS
from l2l_compile.session import session_of
from models import Stack, assert_parity, rows


class Fast(CpuDevice):
    """Computes on the host under another name."""

    def __init__(self, device, pinned_memory):
        super().__init__()
        self.named, self.budget = device, pinned_memory


def fast(**different):
    return DeviceKind(
        **{
            "name": "xpu",
            "open": Fast,
            "complaint": lambda: None,
            "resolve": lambda device: torch.device("xpu", device.index or 0),
            "pins_memory": True,
            "identity": lambda device: ("fast",),
            **different,
        }
    )


def test_a_kind_in_the_registry_runs_models(monkeypatch):
    monkeypatch.setitem(KINDS, "xpu", fast())
    step = assert_parity(Stack(3).double(), rows(6), device="xpu", pinned_memory="2MiB")
    device = session_of(step).device
    assert isinstance(device, Fast)
    assert (device.named, device.budget) == (torch.device("xpu", 0), 2 << 20)


def test_the_report_asks_the_kind_whether_it_pins_memory(monkeypatch):
    found = []
    for pins in (True, False):
        monkeypatch.setitem(KINDS, "xpu", fast(pins_memory=pins))
        report = l2l_compile.explain(Stack(3), {"device": "xpu", "precision": "bf16", "pinned_memory": "4MiB"})(rows(6).float())
        found.append(report.host_memory.pinned)
    assert found[0] > 2 << 20 and found[1] == 0


def test_a_kind_that_is_not_there_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setitem(KINDS, "xpu", fast(complaint=lambda: "its driver is missing"))
    with pytest.raises(OptionError, match="option 'device' is 'xpu', but its driver is missing"):
        Options.build({"device": "xpu:1"})


def test_a_name_without_a_kind_is_refused_with_the_known_ones():
    assert {"cpu", "cuda"} <= set(KINDS)
    with pytest.raises(OptionError, match=f"must be a device of type {' or '.join(map(repr, KINDS))}, got 'xpu'"):
        Options.build({"device": "xpu"})


def test_one_name_for_one_device(monkeypatch):
    monkeypatch.setitem(KINDS, "xpu", fast())
    assert Options.build({"device": "xpu"}).device == Options.build({"device": torch.device("xpu", 0)}).device
    assert Options.build({"device": "cpu:0"}).device == torch.device("cpu")


def test_without_a_name_an_accelerator_of_a_known_kind_is_taken(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    assert Options.build().device == torch.device("cpu")
    monkeypatch.setitem(KINDS, "xpu", fast())
    assert Options.build().device == torch.device("xpu", 0)
