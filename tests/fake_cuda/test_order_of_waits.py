"""Copies that run as late as CUDA allows: no memory of the host changes between the call of a copy and the copy."""

from __future__ import annotations

import pytest

from l2l_compile.devices import cuda
from training_loop import UPDATES, training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", UPDATES)
def test_no_copy_meets_changed_memory(runtime, update, precision):
    runtime.set_lazy(True)
    _, step = training(update, precision=precision)
    for _ in range(4):
        step()
    assert runtime.violations == []


def test_a_ring_that_does_not_wait_is_seen(runtime, monkeypatch):
    """Its slots are written again while a copy out of them is still to come."""
    runtime.set_lazy(True)
    monkeypatch.setattr(cuda.CudaDevice, "wait_on_host", lambda self, event: None)
    _, step = training("at_step", layers=6, pinned_memory="1MiB")
    for _ in range(2):
        step()
    assert any("the source of a copy" in sentence for sentence in runtime.violations)
    runtime.reset()
