"""Calls of CUDA that fail: an error that says so, and the next step works."""

from __future__ import annotations

import pytest
import torch

from l2l_compile import L2LError
from training_loop import UPDATES, training


def test_a_page_lock_that_fails_names_the_option(runtime):
    _, step = training("at_step")
    runtime.fail_locks(1)
    with pytest.raises(L2LError, match=r"page-lock.*pinned_memory"):
        step()
    step()


@pytest.mark.parametrize("update", UPDATES)
def test_steps_work_after_device_memory_ran_out(runtime, update):
    _, step = training(update, layers=2, width=512)  # more than what is free between the tensors of earlier tests
    torch.cuda.empty_cache()
    runtime.set_limit(runtime.counts["device bytes"])
    with pytest.raises(torch.OutOfMemoryError):
        step()
    runtime.set_limit(None)
    for _ in range(2):
        step()
