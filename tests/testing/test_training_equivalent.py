"""`training_equivalent`: several steps, each way to update, with what training loops have besides."""

from __future__ import annotations

import pytest
import torch

from l2l_compile import L2LError, OptionError
from l2l_compile.testing import training_equivalent
from models import WIDTH, EncoderDecoder, Shared, Stack, rows

OPTIONS = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu"}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def titles(found):
    return [c.title for c in found.comparisons]


def test_every_way_to_update_over_steps():
    found = training_equivalent(Stack(2), [rows(n) for n in (6, 7, 2)], adamw, options=OPTIONS)
    assert titles(found) == [
        "update at_step against eager in float64",
        "update in_backward against at_step",
        "update in_forward against at_step",
    ]
    assert all(title in str(found) for title in titles(found)) and found.passes
    first = found.comparisons[0]
    kinds = {d.key.kind for d in first.differences}
    assert kinds == {"loss", "parameter", "optimizer state"}
    assert sum(d.key.kind == "loss" for d in first.differences) == 3
    assert "optimizer state of layers.1.up.weight: exp_avg_sq (segment 'layers.1')" in map(str, first.differences)


def test_updates_that_are_not_compiled_have_the_same_bits():
    options = {**OPTIONS, "compile_update": False}
    found = training_equivalent(Shared(3), [rows(6, dtype=torch.float32)] * 3, adamw, options=options, dtype=None)
    assert all(d.error == 0.0 for c in found.comparisons[1:] for d in c.differences)
    assert {c.rule.tolerance for c in found.comparisons[1:]} == {0.0}


def test_accumulation_clipping_and_a_scheduler():
    batches = [{"x": rows(n)} for n in (6, 4, 6, 5)]
    found = training_equivalent(
        Stack(2),
        batches,
        adamw,
        options=OPTIONS,
        updates=("in_forward",),
        accumulate=2,
        max_grad_norm=0.01,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    steps = {d.key.name: d for d in found.comparisons[0].differences if d.key.name.endswith(": step")}
    assert steps and {d.norm for d in steps.values()} == {2.0}
    with pytest.raises(OptionError, match="in_backward"):
        training_equivalent(Stack(2), batches[:2], adamw, options=OPTIONS, updates=("in_backward",), max_grad_norm=0.01)


def test_parameters_with_rounding_gradients_have_eagers_error():
    """Adam moves the bias of keys by the sign of rounding: as far from eager as eager is from itself with its rows reversed."""
    batches = [rows(12, 4, WIDTH, dtype=torch.float32) for _ in range(3)]
    found = training_equivalent(EncoderDecoder(1), batches, adamw, options=OPTIONS, updates=("in_forward",), dtype=None)
    against_eager, against_at_step = found.comparisons
    bias_of = lambda c: next(d for d in c.differences if str(d.key) == "parameter decoder.0.cross.k.bias")  # noqa: E731
    assert bias_of(against_eager).relative > 1e-5  # two ways to update round alike on some CPUs
    for comparison in (against_eager, against_at_step):
        assert comparison.verdict(bias_of(comparison)).passes
    assert any(v.is_zero for v in map(against_eager.verdict, against_eager.differences))


def test_sixteen_bits_are_compared_among_ways_to_update():
    found = training_equivalent(Stack(2), [rows(6)] * 2, adamw, options={**OPTIONS, "precision": "bf16"})
    assert titles(found) == ["update in_backward against at_step", "update in_forward against at_step"]
    found = training_equivalent(Stack(2), [rows(6)] * 2, adamw, options={**OPTIONS, "precision": "fp16"}, updates=("in_forward",))
    assert found.passes
    with pytest.raises(L2LError, match="nothing to compare"):
        training_equivalent(Stack(2), [rows(6)], adamw, options={**OPTIONS, "precision": "bf16"}, updates=("at_step",))


def test_what_is_refused():
    model = Stack(2)
    with pytest.raises(L2LError, match="3 batches are no whole number of steps of 2"):
        training_equivalent(model, [rows(6)] * 3, adamw, options=OPTIONS, accumulate=2)
    with pytest.raises(L2LError, match="leave it out"):
        training_equivalent(model, [rows(6)], adamw, options={**OPTIONS, "optimizer": adamw(model.parameters())})


def test_a_function_cannot_be_trained():
    with pytest.raises(L2LError, match="training needs a module.*assert_equivalent"):
        training_equivalent(torch.sin, [rows(4)], lambda parameters: torch.optim.SGD(parameters, lr=0.1))
