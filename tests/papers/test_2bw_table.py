"""docs/papers.md has the figures of `paper_pipelines.py` beside table 1 of PipeDream-2BW. `UPDATE_DOCUMENTS=1` writes the table."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

from marked_tables import assert_written

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "examples" / "benchmarks" / "runs" / "pipedream-2bw.json").read_text())["rows"]
GROUPS = [list(rows) for _, rows in itertools.groupby(ROWS, key=lambda row: (row["model"], row["machine"]))]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
    yield importlib.import_module("paper_pipelines")
    sys.path.pop(0)


def shown(row) -> str:
    rate = f"{row['samples/s']:.0f}" if row["samples/s"] else "not had"
    choice = " ✓" if row["paper's choice"] else ""
    return f"| {row['model']}, {row['machine']} | {row['row']} | {row['paper']}{choice} | {rate} |"


def test_the_documented_table_is_that_of_the_script():
    lines = ["| model, machine | (w, d), micro-batch | the paper, samples/s | here, simulated |", "|---|---|---:|---:|"]
    assert_written(ROOT / "docs" / "papers.md", "2bw: table 1", "\n".join([*lines, *map(shown, ROWS)]))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]['model']} on {group[0]['machine']}")
def test_the_fastest_of_a_group_is_the_choice_of_the_paper(group):
    there = [row for row in group if row["samples/s"]]
    if len(there) < 2:
        assert all("recompute" not in row["row"] for row in group if row not in there), "1f1b computes activations again"
        return
    assert max(there, key=lambda row: row["samples/s"])["paper's choice"]


def test_a_simulated_row_still_has_these_figures(script):
    row = script.TABLE[1]
    assert script.measured(row)["samples/s"] == pytest.approx(ROWS[1]["samples/s"], rel=1e-6)
