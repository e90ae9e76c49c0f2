"""What each pass needs is checked before any pass runs."""

from __future__ import annotations

import pytest

from l2l_compile import L2LError
from l2l_compile.passes.pipeline import PIPELINE, PREPARATION, SEGMENTATION, STREAMING, check_order, run


def test_pipeline_is_in_order():
    check_order(PIPELINE)


REQUIRED = [i for i, step in enumerate(PIPELINE) if any(step.provides & later.requires for later in PIPELINE)]


@pytest.mark.parametrize("missing", REQUIRED, ids=[PIPELINE[i].name for i in REQUIRED])
def test_pass_without_what_it_requires_is_refused_by_name(missing):
    passes = PIPELINE[:missing] + PIPELINE[missing + 1 :]
    fact = next(f for f in PIPELINE[missing].provides if any(f in step.requires for step in passes))
    first = next(step for step in passes if fact in step.requires)
    with pytest.raises(L2LError, match=f"'{first.name}' requires .*{fact}"):
        check_order(passes)


def test_only_what_users_read_is_required_by_no_pass():
    providing = {step.name for step in PIPELINE if step.provides}
    assert providing - {PIPELINE[i].name for i in REQUIRED} == {"measure_granularity", "place_updates"}


def test_nothing_runs_when_the_order_is_wrong():
    with pytest.raises(L2LError):
        run(None, PIPELINE[::-1])  # a pass that ran would fail on None with another error


def test_streaming_goes_on_from_the_facts_of_segmentation():
    check_order(STREAMING, frozenset().union(*(step.provides for step in PREPARATION + SEGMENTATION)))
    with pytest.raises(L2LError):
        check_order(STREAMING)


def test_passes_are_values():
    for step in PIPELINE:
        with pytest.raises(AttributeError):
            step.name = "other"
