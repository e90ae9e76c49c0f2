"""What a step asks of CUDA, and how much memory it takes from PyTorch's own allocator."""

from __future__ import annotations

import gc

import pytest
import torch

import l2l_compile
from training_loop import UPDATES, training

NEVER = ("Malloc", "Free", "HostAlloc", "HostRegister", "HostUnregister", "DeviceSynchronize", "h2d pageable", "d2h pageable")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("update", UPDATES)
def test_steps_of_equal_shape_allocate_and_lock_nothing(runtime, update, stash, precision):
    _, step = training(update, stash=stash, precision=precision)
    for _ in range(3):
        step()
    runtime.reset()
    for _ in range(2):
        step()
    assert {name: runtime.counts[name] for name in NEVER if name in runtime.counts} == {}
    assert not [name for name in runtime.counts if name.startswith("not supported")]
    assert runtime.counts["launches"] > 100


@pytest.mark.parametrize("update", UPDATES)
def test_what_goes_to_the_host_is_locked_once(runtime, update):
    """A buffer for each micro-batch of a layer, from the second step on the same ones."""
    _, step = training(update, keep_on_host="1GB")
    for _ in range(4):
        step()
    ranges = runtime.counts["locked ranges"]
    runtime.reset()
    for _ in range(2):
        step()
    assert {name: runtime.counts[name] for name in NEVER if name in runtime.counts} == {}
    assert ranges < 150


def test_device_memory_does_not_grow_with_depth(runtime):
    peaks = []
    for layers in (6, 24):
        model, step = training("in_backward", layers=layers, precision="bf16", outputs="loss")
        for _ in range(3):
            step()
        peaks.append(l2l_compile.stats(model).peak_device_bytes)
        del model, step
        torch._dynamo.reset()
        gc.collect()
    assert peaks[0] == peaks[1]


def test_kept_losses_lock_no_memory_each(runtime):
    _, step = training("at_step", layers=1)
    kept, before = [], 0
    for turn in range(60):
        kept.append(step())
        if turn == 10:
            before = runtime.counts["locked ranges"]
    assert runtime.counts["locked ranges"] == before


def test_models_one_after_another_take_no_more_memory(runtime):
    """Streams are shared, and with them the workspaces of cuBLAS."""
    held = []
    for _ in range(3):
        model, step = training("in_backward", layers=1)
        step()
        del model, step
        torch._dynamo.reset()
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]
