"""examples/coverage.py: a sample of its classes, workers that die or hang, results that are continued."""
from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SAMPLE = (
    "GPT2LMHeadModel", "XLMRobertaForMaskedLM", "LlamaForSequenceClassification", "T5ForConditionalGeneration",
    "ConvNextForImageClassification", "ASTForAudioClassification",
)


@pytest.fixture(scope="module")
def coverage():
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    yield importlib.import_module("coverage")
    sys.path.pop(0)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_classes(coverage, name):
    row = coverage.check(next(job for job in coverage.jobs() if job.name == name))
    assert row["status"] == "parity", row["reason"]
    assert row["repeats"] > 1 and set(row["stacks"].values()) == {coverage.SPLIT}
    assert name in coverage.table([{"name": name, "task": "", **row}])


def test_every_task_has_classes(coverage):
    jobs = coverage.jobs()
    assert len(jobs) >= 350 and len({job.name for job in jobs}) == len(jobs)
    assert len({job.task for job in jobs}) >= 6


def test_errors_are_relative_and_those_of_rounding_are_not(coverage):
    import torch

    tensor = lambda *values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    expected = tensor(2.0), {"weight": tensor(3.0, 4.0), "key.bias": tensor(1e-16), "table": tensor(1e-8), "unused": None}
    assert coverage.error_of(expected, expected, expected)[0] == 0
    off = tensor(2.0), {"weight": tensor(3.0, 4.5), "key.bias": tensor(2e-16), "table": tensor(1e-8), "unused": None}
    assert coverage.error_of(expected, off, expected) == (pytest.approx(0.1), "gradient of weight")
    extra = tensor(2.0), {**off[1], "unused": tensor(0.0)}
    assert coverage.error_of(expected, extra, expected) == (float("inf"), "gradient of unused (extra)")
    assert coverage.error_of(expected, (tensor(float("nan")), expected[1]), expected) == (float("inf"), "loss")
    small = tensor(2.0), {**expected[1], "table": tensor(1.5e-8)}
    assert coverage.error_of(expected, small, expected) == (pytest.approx(0.5), "gradient of table")
    assert coverage.error_of(expected, small, small) == (pytest.approx(1e-9), "gradient of table")  # eager's rows in reverse differ so, too


# ---- workers ---------------------------------------------------------------------------------------------------------


def fake(job, dynamo_only=False):
    if job.name == "crash" and not dynamo_only:
        os._exit(3)
    if job.name == "hang":
        time.sleep(60)
    return {"status": "parity", "dynamo": "parity"}


def fakes(*names):
    return [SimpleNamespace(name=name, task="causal LM") for name in names]


def test_a_crash_and_a_hang_leave_the_others_their_results(coverage, tmp_path):
    path = tmp_path / "runs" / "results.jsonl"
    rows = coverage.collect(fakes("one", "crash", "two", "hang", "three"), path, fake, seconds=3, lifetime=2)
    assert {name: row["status"] for name, row in rows.items()} == {
        "one": "parity", "two": "parity", "three": "parity", "crash": "death", "hang": "hang"}
    assert "3" in rows["crash"]["reason"] and coverage.verdict(rows["crash"]) == "death"
    assert coverage.verdict(rows["hang"]) == "Dynamo fails"  # it hangs without l2l as well
    assert coverage.read(path) == rows


def test_results_are_continued(coverage, tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    coverage.collect(fakes("one"), path, fake, workers=1)
    with path.open("a") as file:
        file.write('\n{"name": "two", "sta')  # killed here
    assert list(coverage.read(path)) == ["one"]
    coverage.collect(fakes("one", "three"), path, fake, workers=1)
    assert list(coverage.read(path)) == ["one", "three"]
    monkeypatch.setattr(coverage, "jobs", lambda: fakes("one", "two", "three"))
    monkeypatch.setattr(coverage, "table", lambda rows: ", ".join(row["name"] for row in rows))
    done = lambda todo, path, **how: {job.name: {"name": job.name, "status": "parity"} for job in todo}  # noqa: E731
    monkeypatch.setattr(coverage, "collect", done)
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--results", str(path), "--table", str(tmp_path / "table.md")])
    assert coverage.main() == 0
    assert (tmp_path / "table.md").read_text() == "two"
