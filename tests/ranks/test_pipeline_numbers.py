"""The stages of a pipeline compute what one rank computes, bit for bit: losses, gradients, and weights after some steps."""

from __future__ import annotations

import pytest
import torch
from pipelines import MODELS, Case, compare, train

import l2l_compile


def equal_bits(rank, world, *cases):
    found = []
    for case in cases:
        mine, of_all = compare(case, world)
        assert mine < of_all
        found.append(mine)
    return found


def check(ranks, world: int, *cases: Case) -> None:
    """Equal bits on each rank, and each entry of the state on one of them at least."""
    names = ranks.run(equal_bits, *cases, world=world, seconds=240)
    for case, *of_ranks in zip(cases, *names, strict=True):
        everything = set(MODELS[case.model]().state_dict())
        shared = set.union(*of_ranks)
        assert shared == everything, everything - shared


@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_has_the_bits_of_one_rank(ranks, model):
    check(ranks, 2, Case(model), Case(model, torch.float64, loops=1))


@pytest.mark.parametrize("model", ["u_shape", "llama", "gpt2"])
@pytest.mark.slow
def test_four_stages_have_the_bits_of_one_rank(ranks, model):
    check(ranks, 4, Case(model, torch.float64), Case(model, loops=1))


OPTIONS = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delay": {"update": "in_forward", "delay": 1},
    "stash on the device": {"stash": "device"},
    "no prefetch": {"prefetch": 0},
    "keep": {"keep": "1MB"},
    "checks": {"check": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_have_the_bits_of_one_rank(ranks, options):
    check(ranks, 2, Case("llama", options=options), Case("u_shape", options=options))


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adafactor"])
def test_optimizers_have_the_bits_of_one_rank(ranks, optimizer):
    check(ranks, 2, Case("llama", optimizer=optimizer), Case("u_shape", optimizer=optimizer, options={"update": "in_forward"}))


def test_an_own_optimizer_has_the_bits_of_one_rank(ranks):
    in_forward = {"update": "in_forward"}
    cases = Case("llama", optimizer="Lion"), Case("llama", optimizer="Lion", options=in_forward)
    check(ranks, 2, *cases, Case("u_shape", optimizer="Lion", options=in_forward))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_have_the_bits_of_one_rank(ranks, precision):
    options = {"precision": precision}
    check(ranks, 2, Case("llama", options=options), Case("u_shape", options={**options, "update": "in_forward"}))


def test_compiled_blocks_have_the_bits_of_one_rank(ranks):
    check(ranks, 2, Case("llama", options={"block_compiler": "inductor"}))


def test_clipping_takes_the_norm_over_all_stages(ranks):
    in_forward = {"update": "in_forward", "max_grad_norm": 0.1}
    check(ranks, 2, Case("llama", max_norm=0.1), Case("gpt2", max_norm=0.1), Case("llama", options=in_forward))
    check(ranks, 3, Case("u_shape", max_norm=0.01), Case("llama", torch.bfloat16, max_norm=0.1))


def test_rows_and_lengths_may_change(ranks):
    check(ranks, 2, Case("llama", rows=(6, 4, 2, 5), lengths=(5, 9, 7, 5)), Case("u_shape", rows=(6, 4, 2, 5)))


def test_values_with_equal_rows_may_have_less_in_the_last_part(ranks):
    check(ranks, 2, Case("stepped", rows=(5, 5, 4, 5), options={"check": True}), Case("llama", rows=(5, 5, 4, 5)))


def in_eager(rank, world):
    case = Case("llama", torch.float64, optimizer="SGD")
    staged = train(case, world)
    torch.manual_seed(0)
    eager = MODELS[case.model]().double()
    loss = eager(**case.batch(0)).loss
    loss.backward()
    assert abs(staged.losses[0] - loss.item()) < 1e-10
    for name, gradient in staged.gradients.items():
        assert (gradient - eager.get_parameter(name).grad).norm() <= 1e-10 * gradient.norm(), name


def test_a_pipeline_has_the_numbers_of_eager(ranks):
    ranks.run(in_eager, world=2)


def an_overflow(rank, world):
    case = Case("llama", options={"precision": "fp16", "update": "in_forward"})
    losses = [train(case), train(case, world)]
    skipped = [l2l_compile.stats(each.compiled).skipped_steps for each in losses]
    scales = [l2l_compile.stats(each.compiled).loss_scale for each in losses]
    assert skipped[0] == skipped[1] and scales[0] == scales[1]


def test_all_stages_skip_a_step_that_overflows(ranks):
    ranks.run(an_overflow, world=2)
