"""tests/coverage/run.py: a sample of its classes, workers that die or hang, results that are continued."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SAMPLE = (
    "LlamaForSequenceClassification",
    "T5ForConditionalGeneration",
    "ConvNextForImageClassification",
    "ASTForAudioClassification",
)


@pytest.fixture(scope="module")
def coverage():
    sys.path.insert(0, str(Path(__file__).parent / "coverage"))
    yield importlib.import_module("run")
    sys.path.pop(0)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.slow(but="LlamaForSequenceClassification")
def test_a_sample_of_the_classes(coverage, name):
    row = coverage.check(job_of(coverage, "transformers", name))
    assert row["status"] == "parity", row["reason"]
    assert row["repeats"] > 1 and set(row["stacks"].values()) == {coverage.SPLIT} and row["largest"] == 1
    assert row["deep"]["layers"] > row["layers"] and row["deep"]["blocks"] == row["blocks"]
    assert name in coverage.table([{"library": "torch", "name": name, "task": "", **row}])


@pytest.mark.parametrize(
    "library, name",
    [("timm", "test_vit"), ("torchvision", "resnet18"), ("diffusers", "DiTTransformer2DModel"), ("torchaudio", "Conformer")],
)
def test_a_class_of_each_other_library(coverage, library, name):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    row = coverage.check(job_of(coverage, library, name))
    assert row["status"] == "parity", row["reason"]
    assert set(row["stacks"].values()) <= {coverage.SPLIT, coverage.ACROSS}


# One of each task whose inputs have a shape of their own: choices, spans, images within text, boxes, series, videos.
@pytest.mark.parametrize(
    "name",
    [
        "BertForMultipleChoice",
        "RobertaForQuestionAnswering",
        "LlavaForConditionalGeneration",
        "YolosForObjectDetection",
        "PatchTSTForRegression",
        "VideoMAEForVideoClassification",
        "DPTForDepthEstimation",
        "ViTForMaskedImageModeling",
    ],
)
def test_a_class_of_each_kind_of_input_trains_eagerly(coverage, name):
    trained = coverage.trains_eagerly(job_of(coverage, "transformers", name))
    assert not isinstance(trained, str), trained


def job_of(coverage, library, name):
    return next(job for job in coverage.jobs() if (job.library, job.name) == (library, name))


def test_every_task_has_classes(coverage):
    jobs = coverage.jobs()
    assert len({job.key for job in jobs}) == len(jobs)
    assert sum(job.library == "transformers" for job in jobs) >= 800
    assert len({job.task for job in jobs if job.library == "transformers"}) >= 30


def test_libraries_that_are_not_installed_are_left_out(coverage, monkeypatch):
    import tiny_models

    monkeypatch.setattr(tiny_models, "LIBRARIES", {"transformers": "transformers_models", "no_such_library": "none"})
    assert list(tiny_models.missing()) == ["no_such_library"]
    assert {job.library for job in tiny_models.jobs()} == {"transformers"}


def test_a_sample_has_jobs_of_each_library(coverage):
    jobs = fakes("one", "two", "three") + fakes("four", library="timm")
    assert [job.library for job in coverage.sampled(jobs, 2)] == ["transformers", "transformers", "timm"]


# ---- structure -------------------------------------------------------------------------------------------------------


LAYERS = {"a": {"a.w", "a.n"}, "b": {"b.w", "b.n"}}
SIZES = {"a.w": 90, "a.n": 10, "b.w": 90, "b.n": 10, "head": 500}


@pytest.mark.parametrize(
    "held, state, largest",
    [
        ([{"a.w", "a.n"}, {"b.w", "b.n", "head"}], "layers", 1.0),
        ([{"a.w"}, {"a.n", "b.w"}, {"b.n", "head"}], "layers, cut inside", 1.0),
        ([{"a.w", "a.n", "b.w"}, {"b.n"}], "a segment holds 2 of 2 layers", 1.9),
        ([{"a.w", "a.n"}, {"head"}], "1 of 2 layers are in no segment", 1.0),
    ],
)
def test_how_a_stack_lies_in_segments(coverage, held, state, largest):
    import structure

    gradients = dict.fromkeys(SIZES, 1.0)
    assert structure.granularity(LAYERS, held, gradients, SIZES) == state
    assert structure.largest(LAYERS, held, SIZES) == largest


def test_the_layers_of_stages_are_the_lists_that_grow(coverage):
    from torch import nn

    import structure

    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # noqa: E731
    staged = lambda *depths: nn.ModuleDict(  # noqa: E731
        {"stages": nn.ModuleList(nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(d))}) for d in depths)}
    )
    model, deeper = staged(2, 3), staged(2, 6)
    growing = structure.growing_lists(model, deeper)
    assert growing == {"stages.*.blocks"}
    assert [(name, len(layers)) for name, layers in structure.stacks(model, growing)] == [
        ("stages.0.blocks", 2),
        ("stages.1.blocks", 3),
    ]
    assert [name for name, _ in structure.stacks(model)] == ["stages"]


# ---- comparison ------------------------------------------------------------------------------------------------------


def test_rows_are_reversed_where_there_are_rows(coverage):
    import torch

    from tiny_models import ROWS

    rows = torch.arange(float(ROWS))
    assert torch.equal(coverage.rows_reversed(rows), rows.flip(0))
    assert coverage.rows_reversed([{"boxes": n} for n in range(ROWS)])[0] == {"boxes": ROWS - 1}
    table = torch.arange(4.0)
    assert coverage.rows_reversed(table) is table and coverage.rows_reversed(True) is True


def test_the_loss_of_normalised_outputs_has_a_gradient(coverage):
    import torch

    from step import distance_to_waves

    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    normalised = torch.nn.functional.layer_norm(torch.randn(4, 8, dtype=torch.float64) @ weight, (8,))
    distance_to_waves(normalised).backward()
    assert weight.grad.abs().max() > 1e-3


def test_a_dtype_that_a_model_computes_in_is_found(coverage):
    import torch

    from step import Narrowest

    x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    with Narrowest(torch.float64) as seen:
        (x.detach().float().cos() * x).sum().backward()  # a table in float32: no gradient flows through it
        assert seen.dtype == torch.float64
        (x.float() @ x.float()).sum().backward()
        assert seen.dtype == torch.float32


@pytest.mark.parametrize("inside, status", [("double", "differs"), ("float", "parity")])
def test_rounding_is_no_difference_if_the_model_is_in_float32(coverage, monkeypatch, inside, status):
    import torch

    import step

    class Model(torch.nn.Linear):
        def forward(self, x):
            return getattr(torch.nn.functional.linear(x, self.weight), inside)().double()

    def off(model, inputs, run=None):
        loss, gradients = step.train(model, inputs, run=run)
        return loss * (1 if run is None else 1 + 1e-8), gradients

    model, inputs = Model(4, 4, bias=False).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    expected = step.train(model, inputs)
    model.zero_grad()
    monkeypatch.setattr(coverage, "train", off)
    row = coverage.compiled_step(model, inputs, expected, expected, "eager", None)
    assert row["status"] == status, row["reason"]


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
    assert coverage.error_of(expected, small, small) == (
        pytest.approx(1e-9),
        "gradient of table",
    )  # eager's rows in reverse differ so, too
    choices = tensor(1.1), {"weight": tensor(0.018), "classifier.bias": tensor(-6e-17)}  # softmax over choices: exactly 0
    noise = tensor(1.1), {"weight": tensor(0.018), "classifier.bias": tensor(-8e-17)}
    assert coverage.error_of(choices, noise, choices)[0] < 1e-14
    wrong = tensor(1.1), {"weight": tensor(0.018), "classifier.bias": tensor(1e-12)}
    assert coverage.error_of(choices, wrong, choices)[0] > 1


# ---- workers ---------------------------------------------------------------------------------------------------------


def fake(job, dynamo_only=False):
    if job.name == "crash" and not dynamo_only:
        os._exit(3)
    if job.name == "hang":
        time.sleep(60)
    return {"status": "parity", "dynamo": "parity"}


def fakes(*names, library="transformers"):
    return [SimpleNamespace(library=library, name=name, key=f"{library}/{name}", task="causal LM") for name in names]


def by_name(rows):
    return {row["name"]: row for row in rows.values()}


@pytest.mark.slow
def test_a_crash_and_a_hang_leave_the_others_their_results(coverage, tmp_path):
    path = tmp_path / "runs" / "results.jsonl"
    rows = coverage.collect(fakes("one", "crash", "two", "hang", "three"), path, fake, seconds=3, lifetime=2)
    assert coverage.read(path) == rows
    rows = by_name(rows)
    assert {name: row["status"] for name, row in rows.items()} == {
        "one": "parity",
        "two": "parity",
        "three": "parity",
        "crash": "death",
        "hang": "hang",
    }
    assert "3" in rows["crash"]["reason"] and coverage.verdict(rows["crash"]) == "death"
    assert coverage.verdict(rows["hang"]) == "Dynamo fails"  # it hangs without l2l as well


def test_results_are_continued(coverage, tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    coverage.collect(fakes("one"), path, fake, workers=1)
    with path.open("a") as file:
        file.write('\n{"name": "two", "sta')  # killed here
    assert list(by_name(coverage.read(path))) == ["one"]
    coverage.collect(fakes("one", "three"), path, fake, workers=1)
    assert list(by_name(coverage.read(path))) == ["one", "three"]
    monkeypatch.setattr(coverage, "jobs", lambda: fakes("one", "two", "three"))
    monkeypatch.setattr(coverage, "table", lambda rows: ", ".join(row["name"] for row in rows))
    done = lambda todo, path, **how: {job.name: {"name": job.name, "status": "parity"} for job in todo}  # noqa: E731
    monkeypatch.setattr(coverage, "collect", done)
    monkeypatch.setattr(sys, "argv", ["run.py", "--results", str(path), "--table", str(tmp_path / "table.md")])
    assert coverage.main() == 0
    assert (tmp_path / "table.md").read_text() == "two"
