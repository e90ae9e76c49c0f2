"""What is in memory and what on disk: a pure function of sizes and a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from l2l_compile.host.disk_placement import SMALL, TensorSizes, place_on_disk

SIZES = st.lists(
    st.builds(TensorSizes, st.integers(0, 8 * SMALL), st.integers(0, 16 * SMALL), st.booleans()), min_size=1, max_size=40
)
LAYERS = [TensorSizes(4 * SMALL, 8 * SMALL)] * 16
WHOLE = 16 * 12 * SMALL


@given(SIZES, st.integers(0, 400 * SMALL))
def test_placements_keep_the_budget_as_far_as_tensors_allow(sizes, budget):
    found = place_on_disk(sizes, budget)
    movable = sum(each.master + each.state for each in sizes if each.leaves)
    total = sum(each.master + each.state for each in sizes)
    assert found.on_disk + found.in_memory == total
    assert found.in_memory <= max(budget, total - movable)
    assert not any(away and not each.leaves for each, away in zip(sizes, found.masters, strict=True))
    assert not any(away and not each.leaves for each, away in zip(sizes, found.states, strict=True))
    assert found == place_on_disk(list(sizes), budget), "the same question has the same answer"


@given(SIZES, st.integers(0, 400 * SMALL), st.integers(0, 100 * SMALL))
def test_a_larger_budget_leaves_no_more_on_disk(sizes, budget, more):
    largest = max(max(each.master, each.state) for each in sizes)
    assert place_on_disk(sizes, budget + more).on_disk <= place_on_disk(sizes, budget).on_disk + largest


def test_nothing_is_on_disk_if_all_fits():
    found = place_on_disk(LAYERS, WHOLE)
    assert found.on_disk == 0 and not any(found.masters) and not any(found.states)


def test_state_leaves_memory_before_parameters_do():
    found = place_on_disk(LAYERS, WHOLE - 16 * 8 * SMALL)
    assert all(found.states) and not any(found.masters)
    found = place_on_disk(LAYERS, WHOLE - 16 * 8 * SMALL - 1)
    assert all(found.states) and sum(found.masters) == 1


def test_what_stays_in_memory_is_spread_evenly():
    found = place_on_disk(LAYERS, WHOLE - 8 * 8 * SMALL)
    assert found.states == (True, False) * 8 or found.states == (False, True) * 8


def test_small_tensors_stay_in_memory_whatever_the_budget():
    found = place_on_disk([TensorSizes(SMALL - 1, 2 * SMALL), TensorSizes(SMALL, 2 * SMALL)], 0)
    assert found.masters == found.states == (False, True)
