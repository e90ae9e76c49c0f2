"""Every benchmark finds what it uses of the package, and one of them runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "gpu")  # test_gpu_script.py runs it


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)  # figures are written to runs/


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_imports(name):
    importlib.import_module(name)


def test_overhead_tells_the_time_within_blocks_apart(monkeypatch, capsys):
    overhead = importlib.import_module("overhead")
    monkeypatch.setattr(overhead.segment_run._Run, "call", overhead.segment_run._Run.call)  # it is put back
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--quick", "--device", "cpu"])
    overhead.main()
    figures = {line.rsplit(maxsplit=2)[0].strip(): float(line.split()[-2]) for line in capsys.readouterr().out.split("\n")[3:6]}
    assert figures["whole step"] > figures["without blocks"] > figures["of which the program's interpreter"] > 0
