"""The list of rewrites from Dynamo's graph to a captured graph."""

from __future__ import annotations

import pytest

from l2l_compile import L2LError
from l2l_compile.frontend.capture import REWRITES
from l2l_compile.frontend.draft import Draft, DraftFact, Rewrite, rewrite

IN_PLACE = tuple(Rewrite(lambda draft: None, each.requires, each.provides) for each in REWRITES)


def test_every_rewrite_comes_behind_what_it_requires():
    rewrite(Draft(None), IN_PLACE)
    for number, late in enumerate(IN_PLACE):
        if late.requires:
            with pytest.raises(L2LError, match="requires .*, which no rewrite before it provides"):
                rewrite(Draft(None), (late, *IN_PLACE[:number]))


def test_every_fact_is_provided_once_and_required_later():
    provided = [fact for each in REWRITES for fact in each.provides]
    assert sorted(provided) == sorted(DraftFact)
    required = {fact for each in REWRITES for fact in each.requires}
    assert set(DraftFact) - required == {DraftFact.SPECS}  # for the passes


def test_a_rewrite_is_named_by_its_function():
    names = [each.name for each in REWRITES]
    assert len(set(names)) == len(names) and names[0] == "inline" and names[-1] == "specify"
