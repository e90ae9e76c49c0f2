"""The documented report of a model of 70 billion parameters with a disk, on a machine with little host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from l2l_compile import Machine
from l2l_compile.command.asked import Asked, Settings
from l2l_compile.planner.fit import Fit
from l2l_compile.units import format_bytes
from marked_tables import assert_written

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.slow
def test_the_documented_report_of_70_billion_is_true(tmp_path):
    config = {**json.loads((ROOT / "examples" / "llama-3-8b.json").read_text()), **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = replace(Machine.load("rtx4090"), host_memory=24e9)
    settings = Settings(disk="/nvme", update="in_backward", batch=8, length=512)
    report = Asked(str(tmp_path), settings, machine).report
    assert 70e9 < report.host_memory.parameters < 71e9
    rows = [(need.memory, need.bytes, need.room) for need in Fit.of(report, machine).needs]
    assert all(size <= room for _, size, room in rows)
    plan = report.host_memory.disk
    lines = ["| memory | needed | there |", "|---|---|---|"]
    lines += [f"| {name} | {format_bytes(size)} | {format_bytes(room)} |" for name, size, room in rows]
    parts = {"parameters": plan.masters, "optimizer state": plan.states, "copies that cross the link": plan.copies}
    said = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    lines += [f"| disk, read and written in each step | {format_bytes(plan.placement.on_disk)}: {said} | |"]
    assert_written(ROOT / "docs" / "disk.md", "disk: 70 B", "\n".join(lines))
