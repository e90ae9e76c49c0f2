"""The strategies of Hypothesis, and what is there without it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from l2l_compile import Options
from l2l_compile.testing import assert_equivalent, batches, options, stacks

FEW = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FIRST = settings(phases=[Phase.generate], derandomize=True, deadline=None)  # without making it smaller
MANY = settings(max_examples=50, deadline=None, derandomize=True)


@FEW
@given(stacks(depths=(1, 3)), options(), st.data())
def test_drawn_models_batches_and_options_are_equivalent(model, chosen, data):
    torch._dynamo.reset()
    assert_equivalent(model, data.draw(batches(model.example())), options=chosen)


@MANY
@given(options(prefetch=0, precision="bf16"))
def test_options_are_valid_and_keep_what_is_fixed(chosen):
    built = Options.build(chosen)
    assert (built.prefetch, built.precision, built.block_compiler) == (0, "bf16", "eager")


EXAMPLE = {
    "tokens": torch.arange(12).view(4, 3),
    "nested": (torch.arange(4.0), torch.ones(2)),
    "flag": True,
}


@MANY
@given(batches(EXAMPLE, rows=(2, 7)))
def test_batches_are_rows_of_the_example(batch):
    rows = [row.tolist() for row in EXAMPLE["tokens"]]
    chosen = [rows.index(row.tolist()) for row in batch["tokens"]]
    assert 2 <= len(chosen) <= 7
    assert batch["nested"][0].tolist() == [float(i) for i in chosen]
    assert torch.equal(batch["nested"][1], torch.ones(2)) and batch["flag"] is True


def test_uneven_batches_are_drawn():
    found = find(batches(torch.zeros(4, 2)), lambda batch: len(batch) % 3 == 2 and len(batch) > 3)
    assert len(found) == 5
    with pytest.raises(NoSuchExample):
        find(batches(torch.zeros(4, 2), rows=(1, 3)), lambda batch: len(batch) > 3)


def test_rows_in_another_dimension():
    batch = find(batches({"x": torch.zeros(3, 4, 2), "lengths": torch.zeros(2)}, dim=1), lambda b: b["x"].shape[1] == 7)
    assert batch["x"].shape == (3, 7, 2) and batch["lengths"].shape == (2,)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda plan: len(set(plan.layers)) == 2,
        lambda plan: len(set(plan.order)) < len(plan.order),
        lambda plan: plan.frozen,
        lambda plan: "states" in plan.outputs,
        lambda plan: any(layer.mixer == "attention" and layer.norm == "rms" for layer in plan.layers),
    ],
)
def test_models_of_every_kind_are_drawn(wanted):
    model = find(stacks(), lambda model: wanted(model.plan), settings=FIRST)
    assert model(model.example(3)) and repr(model).startswith("StackPlan(layers=(LayerPlan(")


def test_a_model_that_is_drawn_is_made_of_its_plan_alone():
    model = find(stacks(), lambda model: len(model.layers) > 1, settings=FIRST)
    torch.manual_seed(1)
    again = type(model)(model.plan)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(model.example(), again.example())


def test_without_hypothesis_strategies_say_what_to_install(launcher):
    script = """
import sys
assert "hypothesis" not in sys.modules
sys.modules["hypothesis"] = None
import torch
from l2l_compile.testing import assert_equivalent, batches, options, stacks
assert_equivalent(torch.nn.Linear(4, 4), torch.randn(3, 4), options={"block_compiler": "eager", "device": "cpu"})
for strategy in (options, stacks, lambda: batches(torch.zeros(3))):
    try:
        strategy()
    except Exception as error:
        print(error)
"""
    done = launcher.run(script)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"l2l_compile.testing.{name}" for name in ("options", "stacks", "batches")]
    assert all(line.endswith("draws with Hypothesis: pip install hypothesis") for line in lines)
