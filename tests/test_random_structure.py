"""Random compositions of stacks: every layer is a segment, whichever way they are combined, and gradients are exact."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from l2l_compile.passes.pipeline import SEGMENTATION
from models import backward_of_loss, compilation, pair_of
from random_structures import Planned, largest_bytes, owners, plans
from structures import WIDTH

CUT = SEGMENTATION[:2]
MODEST = settings(  # an example traces a model: shrinking would take minutes
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
FEW = settings(MODEST, max_examples=6)


def inputs(rows: int = 6):
    torch.manual_seed(1)
    return [torch.randn(rows, 5, WIDTH, dtype=torch.float64) for _ in range(2)]


def built(plan) -> Planned:
    torch.manual_seed(0)
    model = Planned(plan).double()
    assume(model(*inputs()).requires_grad)
    return model


def with_parameters(segments) -> set:
    """The blocks of segments with parameters. Where the last layer ends among operations without any may depend on depth."""
    return {segment.block for segment in segments if segment.parameter_names}


@MODEST
@given(plans())
@pytest.mark.slow
def test_no_segment_exceeds_one_layer_or_the_largest_in_bytes(plan):
    model = built(plan)
    owner = owners(model)
    for segment in compilation(model, *inputs(), passes=CUT).segments:
        assert len({owner[p] for p in segment.parameter_names if p in owner}) <= 1
        assert segment.parameter_bytes <= largest_bytes(model)


@FEW
@given(plans(depths=(3,)))
@pytest.mark.slow
def test_deeper_towers_make_no_more_blocks(plan):
    if any(call.how == "skips" for call in plan.calls):  # beside skips, the neighbours of an odd layer depend on the depth
        plan = replace(plan, towers=tuple(replace(tower, odd=None) for tower in plan.towers))
    shallow, deep = (compilation(built(p), *inputs(), passes=CUT) for p in (plan, plan.deeper(2)))
    assert len(with_parameters(deep.segments)) <= len(with_parameters(shallow.segments))


@FEW
@given(plans(depths=(6, 7)))
@pytest.mark.slow
def test_without_names_no_segment_is_larger_than_two_layers(plan):
    """Layers of two towers that take turns and read each other are one layer of two parts, if nothing names them."""
    model = built(replace(plan, towers=tuple(replace(tower, odd=None) for tower in plan.towers)))
    with mock.patch("l2l_compile.passes.operation_sequence.module_stack", lambda node: []):
        found = compilation(model, *inputs(), passes=CUT)
    assert max(s.parameter_bytes for s in found.segments) <= 2 * largest_bytes(model)


@FEW
@given(plans(depths=(1, 2, 3)), st.integers(1, 7), st.integers(1, 4))
def test_gradients_are_exact(plan, rows, micro_batches):
    model = built(plan)
    torch._dynamo.reset()
    pair_of(model, micro_batches=micro_batches).run(backward_of_loss, *inputs(rows)).check()
