"""What a step asks of CUDA, and how much memory it takes from PyTorch's own allocator."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import l2l_compile
from training_loop import UPDATES, training

SEGMENT = 20 << 20  # bytes in which the caching allocator places blocks of 1 to 10 MiB
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


@pytest.mark.parametrize("update", UPDATES)
def test_the_allocator_reserves_little_more_than_the_peak(runtime, update):
    _, step = training(update, layers=6, width=512, precision="bf16")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        step()
    assert torch.cuda.memory_reserved() == reserved
    assert reserved <= 1.1 * torch.cuda.max_memory_allocated() + SEGMENT


def test_kept_losses_map_and_lock_no_memory_each(runtime):
    """A process may have 65,530 mappings: one for each loss would end a run of as many steps."""
    _, step = training("at_step", layers=1, width=16)
    kept, found = [], []
    for turn in range(701):
        kept.append(step())
        if turn in (100, 700):
            found.append((runtime.counts["locked ranges"], len(Path("/proc/self/maps").read_text().splitlines())))
    (locked, mapped), (locked_later, mapped_later) = found
    assert locked_later == locked
    assert mapped_later - mapped < 60


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
