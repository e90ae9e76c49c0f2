"""On a GPU: the parity part of examples/benchmarks/gpu.py, as many settings as cover every pair of values, and its questions.

pytest -m gpu
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "benchmarks"))
cases = importlib.import_module("gpu_stages.cases")
parity = importlib.import_module("gpu_stages.parity")
rows = importlib.import_module("gpu_stages.rows")
sys.path.pop(0)

COVERING = 30  # settings that contain every pair of values
NAMES = [case.name for case in parity.cases(cases.Context("parity", torch.device("cpu"), 0.0, None))][: 2 * COVERING]

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_parity(tmp_path, name):
    """Every figure of a case is within its limit."""
    context = cases.Context("parity", torch.device("cuda", 0), time.time() + 600, rows.Journal(tmp_path / "journal"))
    case = next(case for case in parity.cases(context) if case.name == name)
    case.work(cases.Report(context, name))
    found = [row for kind, row in rows.read_journal(tmp_path / "journal") if kind == "row"]
    assert found and not [row for row in found if row.is_bad]
