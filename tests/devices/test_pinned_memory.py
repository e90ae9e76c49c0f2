"""Page-locked memory: within its budget, used again, never while a copy out of it is under way."""

from __future__ import annotations

import gc

import pytest
import torch

from l2l_compile import L2LError
from l2l_compile.devices.staging import Staging, ring_bytes
from l2l_compile.memory.pages import PinnedMemory, Pool
from l2l_compile.options import Options
from models import Stack, compiled


def memory_of(budget):
    locked = {}
    return PinnedMemory(budget, locked.__setitem__, locked.__delitem__), locked


def test_exact_sizes_within_the_budget_and_given_back():
    memory, locked = memory_of(1000)
    first, is_pinned = memory.take(600, "a test")
    assert is_pinned and locked == {first.data_ptr(): 600}
    second, is_pinned = memory.take(600, "a test")
    assert not is_pinned and second.numel() == 600
    view = first[10:].view(torch.uint8)
    del first
    assert memory.used == 600  # a view keeps it
    del view
    assert memory.used == 0 and not locked


def test_a_refusal_of_the_system_names_size_purpose_and_option():
    def refuse(address, size):
        raise RuntimeError("out of memory")

    with pytest.raises(L2LError, match=r"page-lock 2.0 MiB for the weights.*pinned_memory"):
        PinnedMemory(None, refuse, None).take(2 << 20, "the weights")
    with pytest.raises(L2LError, match="has no .* for a test"):
        PinnedMemory(None, refuse, None).take(1 << 60, "a test")


def test_a_buffer_is_used_again_when_its_last_copy_is_done():
    memory, _ = memory_of(None)
    pool = Pool(memory, lambda event: event["done"])
    tensor, event = pool.empty(torch.Size((3, 5)), torch.float32, "a test"), {"done": False}
    address = tensor.data_ptr()
    pool.reads(tensor, event)
    del tensor
    gc.collect()
    other = pool.empty(torch.Size((15,)), torch.float32, "a test")
    assert other.data_ptr() != address
    event["done"] = True
    assert pool.empty(torch.Size((5, 3)), torch.int32, "a test").data_ptr() == address


def test_the_ring_waits_for_a_slot():
    """Copies are carried out late; what is waited for is carried out first."""
    memory, _ = memory_of(1 << 20)
    assert ring_bytes(1 << 20) == 1 << 19
    late = []

    class Device(torch.Tensor):  # stands for device memory: a copy into it happens when its event is waited for
        def copy_(self, source, non_blocking=False):
            late.append((self.as_subclass(torch.Tensor), source))
            return self

    def wait(count):
        while late and wait.done < count:
            target, source = late.pop(0)
            target.copy_(source)
            wait.done += 1

    wait.done = 0
    sent = []

    def record():
        sent.append(None)
        return len(sent)

    staging = Staging(memory, record, wait)
    source = torch.randn(700_001)
    target = torch.zeros(source.numel() * 4, dtype=torch.uint8)
    staging.send(source, target.as_subclass(Device))
    wait(len(sent))
    assert torch.equal(target.view(torch.float32), source)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_small_budget_changes_no_number(threaded, precision):
    reference, x = Stack(), torch.randn(6, 5)
    found = []
    for budget in (None, "1MiB"):
        model = Stack()
        model.load_state_dict(reference.state_dict())
        step = compiled(model, pinned_memory=budget, precision=precision)
        for _ in range(2):
            step(x).pow(2).mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert threaded.devices[-1].pinned.used <= 1 << 20


def test_the_option():
    assert Options.build({"pinned_memory": "8GB"}).pinned_memory == 8 * 10**9
    assert Options.build({"pinned_memory": "0.5GiB"}).pinned_memory == 1 << 29
    for value in ("8", "many", 5, True, "1KB", -1):
        with pytest.raises(ValueError, match="pinned_memory"):
            Options.build({"pinned_memory": value})
