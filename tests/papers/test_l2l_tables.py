"""docs/papers.md has the figures of `examples/benchmarks/paper_tables.py`, which a program still has. `UPDATE_DOCUMENTS=1` writes the tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from marked_tables import assert_written

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
FIGURES = json.loads((ROOT / "examples" / "benchmarks" / "runs" / "l2l-tables.json").read_text())["rows"]
MEMORY = [row for row in FIGURES if "bytes" in row]
RATIOS = [row for row in FIGURES if "ratio" in row]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
    yield importlib.import_module("paper_tables")
    sys.path.pop(0)


def memory() -> str:
    lines = ["| table | case | the paper | here |", "|---|---|---:|---:|"]
    lines += [f"| {row['table']} | {row['case']} | {row['paper GB']:.2f} GB | {row['bytes']:,} bytes |" for row in MEMORY]
    return "\n".join(lines)


def ratios() -> str:
    lines = ["| case | samples a second, over those of one micro-batch | by equation 6 |", "|---|---:|---:|"]
    lines += [f"| {row['case']} | {row['ratio']:.3f} | {row['equation 6']:.3f} |" for row in RATIOS]
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "table"), [("memory", memory), ("ratios", ratios)])
def test_the_documented_tables_are_those_of_the_script(name, table):
    assert_written(PAGE, f"l2l: {name}", table())


def test_memory_is_at_most_that_of_the_paper_and_flat():
    assert len(MEMORY) == 11 and all(row["bytes"] <= 1e9 * row["paper GB"] for row in MEMORY)
    on_host = {row["bytes"] for row in MEMORY if row["case"].startswith("stash on the host")}
    assert len(on_host) == 1
    by_depth = [row["bytes"] for row in MEMORY if row["case"].startswith("stash on the GPU")]
    assert (by_depth[2] - by_depth[1]) == 2 * (by_depth[1] - by_depth[0]) == 48 * 64 * 512 * 1024 * 2


def test_ratios_are_those_of_the_equation():
    for row in RATIOS:
        assert row["ratio"] == pytest.approx(row["equation 6"], rel=0.05)


@pytest.mark.parametrize("case", ["CMP, 64 × 1", "CMP, 64 × 2", "fp32, 64 × 1", "stash on the GPU, 48 layers"])
@pytest.mark.slow(but="CMP, 64 * 1")
def test_a_simulated_step_still_has_these_figures(script, case):
    row = next(row for row in script.TABLES if row.case == case)
    expected = next(row for row in MEMORY if row["case"] == case)
    found = script.simulated(row)
    assert found.peak_device_bytes == expected["bytes"]
    assert script.ROWS * row.micro_batches / found.seconds == pytest.approx(expected["samples/s"], rel=1e-3)
