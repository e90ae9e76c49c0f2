"""Cases of examples/benchmarks/gpu.py that need a GPU and no numbers: page-locks, copies, a machine file."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
cases, rows, copies = (importlib.import_module(f"gpu_stages.{name}") for name in ("cases", "rows", "copies"))
sys.path.pop(0)


@pytest.mark.parametrize("work", [copies.page_locking, copies.machine_file], ids=lambda work: work.__name__)
def test_a_case_of_the_gpu_script_ends_by_itself(runtime, tmp_path, work):
    """Speed on this runtime says nothing, so a figure may be beyond its limit."""
    context = cases.Context("stage", torch.device("cuda", 0), time.time() + 300, rows.Journal(tmp_path / "journal"))
    assert cases.run_cases(context, [cases.Case("case", lambda report: work(context, report))], tmp_path / "journal") == 0
    found = [row for kind, row in rows.read_journal(tmp_path / "journal") if kind == "row"]
    assert found and not [row for row in found if row.verdict == "error"]
