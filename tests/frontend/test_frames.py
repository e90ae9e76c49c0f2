import resource

import pytest

from l2l_compile.torch_internals.frame_memory import with_room


def _leaf(a=0, b=0, c=0, d=0):
    return a


def _faults_at(depth, calls=200):
    """Pages that were asked for by calls made one after the other at this depth."""
    if depth:
        return _faults_at(depth - 1, calls)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(calls):
        _leaf()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _most_faults():
    return max(_faults_at(depth) for depth in range(300))


def test_calls_ask_for_no_memory_at_any_depth():
    if _most_faults() < 200:
        pytest.skip("this Python gives its frames room by itself")
    assert with_room(_most_faults) < 50


def test_arguments_results_and_errors_pass_through():
    assert with_room(divmod, 7, 2) == (3, 1)
    assert with_room(sorted, [1, 2], reverse=True) == [2, 1]
    with pytest.raises(ValueError, match="'x'"):
        with_room(int, "x")
