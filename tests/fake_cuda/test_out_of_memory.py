"""Each allocation of device memory in a step fails in turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from training_loop import UPDATES


@pytest.mark.parametrize("update", [u for u in UPDATES if u != "in_backward"])  # it has updated the layers behind the failure
def test_a_step_after_memory_ran_out_has_the_same_numbers(runtime, update):
    """In a process whose tensors are allocations of the driver each: the caching allocator would hide most of them."""
    script = Path(__file__).parent / "out_of_memory.py"
    alone = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([sys.executable, str(script), update], env=alone, capture_output=True, text=True, timeout=900)
    found = re.fullmatch(r"(\d+) failures, (-?\d+) bytes left behind, the same numbers\n", done.stdout)
    assert found, done.stdout + done.stderr[-3000:]
    assert int(found[1]) > 100 and int(found[2]) <= 0
