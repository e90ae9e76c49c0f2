"""Plans of random cases against brute force, with the script that measures them, on tiny models and tiny memories."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("place", range(5), ids=["gpt2", "t5", "mixtral", "bert", "llama"])
@pytest.mark.slow(but="llama")
def test_no_set_of_brute_force_is_faster(place, request):
    cases, held_out = map(importlib.import_module, ("planner_cases", "planner_held_out"))
    case = cases.drawn(3, 5, tiny=True)[place]
    assert case.family == request.node.callspec.id
    row = held_out.compared(case, 24)
    assert row["fit"] > 10, "brute force finds sets that fit"
    assert row["plan / best"] <= held_out.NEAR


def test_cases_of_a_seed_are_always_the_same():
    drawn = importlib.import_module("planner_cases").drawn
    assert drawn(1, 6) == drawn(1, 6) != drawn(2, 6)
    assert {case.family for case in drawn(1, 5)} == set(importlib.import_module("planner_cases").FAMILIES)
