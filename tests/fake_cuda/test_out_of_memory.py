"""Each allocation of device memory in a step fails in turn."""

from __future__ import annotations

import re

import pytest

from processes import lines_of
from training_loop import UPDATES

# Each tensor is an allocation of the driver: the caching allocator would hide most of them.
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@pytest.mark.parametrize("update", [u for u in UPDATES if u != "in_backward"])  # it has updated the layers behind the failure
def test_a_step_after_memory_ran_out_has_the_same_numbers(runtime, update):
    (line,) = lines_of("out_of_memory.py", update, seconds=900, **ALONE)
    found = re.fullmatch(r"(\d+) failures, (-?\d+) bytes left behind, the same numbers", line)
    assert found, line
    assert int(found[1]) > 100 and int(found[2]) <= 0


def test_a_step_that_runs_out_updates_whole_layers_alone(runtime):
    """With `in_backward`: a parameter is as before the step or as behind it, in each step that fails, and the next one works."""
    (line,) = lines_of("out_of_memory.py", "in_backward", seconds=900, **ALONE)
    found = re.fullmatch(r"(\d+) failures, (-?\d+) bytes left behind, (\d+) steps in part, 0 parameters torn", line)
    assert found, line
    assert int(found[1]) > 100 and int(found[2]) <= 0 and int(found[3]) > 10
