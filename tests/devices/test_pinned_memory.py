"""Page-locked memory: within its budget, used again, never while a copy out of it is under way."""

from __future__ import annotations

import gc
import itertools
import mmap
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from l2l_compile import L2LError
from l2l_compile.devices.staging import Staging, ring_bytes
from l2l_compile.memory.in_place import PAGE
from l2l_compile.memory.pages import PinnedMemory, Pool, pages
from l2l_compile.options import Options
from l2l_compile.session import session_of
from models import WIDTH, Layer, Stack, compiled


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
    with pytest.raises(L2LError, match="could not allocate .* for a test"):
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


def test_no_python_code_runs_where_a_buffer_is_let_go():
    """PyTorch lets go of a gradient in the middle of `p.grad = None`: a signal handler that ran there would read what is gone."""
    pool, called = Pool(memory_of(None)[0]), []
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = pool.empty(torch.Size([3]), torch.float32, "a test")
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    parameter.grad = None
    sys.setprofile(None)
    assert not called
    assert pool._in_use[PAGE] == 1 and len(pool._put_back) == 1
    pool._take_back()
    assert pool._in_use[PAGE] == 0


def test_a_pool_holds_nothing_after_an_error_at_any_line():
    """A signal handler may raise one: KeyboardInterrupt, or a notebook's request to stop."""
    code, stopped = Pool.lease.__code__.co_filename, []
    while True:
        memory, locked = memory_of(None)
        pool, lines = Pool(memory), itertools.count()

        def trace(frame, event, argument, lines=lines):
            if frame.f_code.co_filename == code and event == "line" and next(lines) == len(stopped):
                stopped.append(frame.f_lineno)
                raise KeyboardInterrupt
            return trace

        pool.empty(torch.Size([3]), torch.float32, "a test")
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            pool.empty(torch.Size([3]), torch.float32, "a test")
            break
        sys.settrace(None)
        pool.begin_step()
        first, second = (pool.empty(torch.Size([3]), torch.float32, "a test") for _ in range(2))
        assert first.data_ptr() != second.data_ptr(), stopped[-1]
        del first, second
        pool.begin_step()
        assert pool.size == memory.used == sum(locked.values()) == 2 * PAGE, stopped[-1]
    sys.settrace(None)
    assert len(set(stopped)) > 30


def test_tensors_of_every_size_share_the_memory_of_the_largest():
    """Whatever their order; what waits for a copy is not given back."""
    memory, locked = memory_of(None)
    pool = Pool(memory)
    for turn in range(20):
        for size in (1000, 700, 130, 400, 999):
            pool.begin_step()
            kept = [pool.empty(torch.Size([(size + turn) * PAGE]), torch.uint8, "a test") for _ in range(3)]
            assert memory.used == pool.size == sum(locked.values()) <= 1.2 * 3 * 1019 * PAGE
            del kept
    assert pool.size >= 3 * 1000 * PAGE


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
@pytest.mark.parametrize("size", [16 << 20, 1 << 20])
def test_large_buffers_ask_for_huge_pages(size):
    buffer = pages(size, "a test")
    address, asked = buffer.data_ptr(), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
        elif line.startswith("VmFlags:") and first <= address < last:
            asked = "hg" in line.split()
    assert asked == (size >= 16 << 20)


def test_equal_steps_take_no_more_memory():
    """Whatever is in use at once: the buffers of one part of a step are too small for the next part."""
    memory, _ = memory_of(None)
    pool, takes = Pool(memory), []
    for _ in range(4):
        pool.begin_step()
        before = pool.size
        for count in (1, 20, 3, 200, 20):
            kept = [pool.empty(torch.Size([count * PAGE - 1]), torch.uint8, "a test") for _ in range(2)]
            del kept
        takes.append(pool.size - before)
    assert takes == [2 * (1 + 20 + 200) * PAGE, 0, 0, 0]  # three pages lie in the buffers of twenty


def test_what_a_copy_reads_is_not_given_back():
    memory, _ = memory_of(None)
    pool = Pool(memory, lambda event: event["done"])
    small, event = pool.empty(torch.Size([100 * PAGE]), torch.uint8, "a test"), {"done": False}
    pool.reads(small, event)
    del small
    pool.begin_step()
    large = pool.empty(torch.Size([110 * PAGE]), torch.uint8, "a test")
    assert pool.size == 210 * PAGE == memory.used
    event["done"] = True
    pool.begin_step()
    larger = pool.empty(torch.Size([120 * PAGE]), torch.uint8, "a test")
    assert pool.size == 230 * PAGE == memory.used
    del large, larger


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_copy_of_one_tensor_keeps_the_buffer_of_several(copied):
    """A gradient may be the input of another call, which copies it to the device while its owner lets go of it."""
    pool = Pool(memory_of(None)[0], lambda event: event["done"])
    like = [torch.empty(0), torch.empty(3), torch.empty(5, 2)]
    tensors, event = pool.empty_together([torch.empty(7), *like], "a test"), {"done": False}
    addresses = {tensor.data_ptr() for tensor in tensors}
    pool.reads([tensor for tensor in tensors if tensor.numel()][copied], event)
    del tensors
    gc.collect()
    others = pool.empty_together([torch.empty(7), *like], "a test")
    assert others[0].data_ptr() not in addresses
    event["done"] = True
    assert pool.empty(torch.Size([7]), torch.float32, "a test").data_ptr() in addresses


def test_a_refusal_leaves_the_pool_as_it_was():
    def refuse(address, size):
        raise RuntimeError("out of memory")

    pool = Pool(PinnedMemory(None, refuse, None))
    for _ in range(2):
        with pytest.raises(L2LError, match="page-lock"):
            pool.empty(torch.Size([100]), torch.uint8, "a test")
    assert pool.size == 0


LENGTHS, ROWS = (16, 9, 12), (6, 4)


class Text(torch.nn.Module):
    """Layers over text of any length, and an output for each token."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("precision", "update"), [("fp32", "at_step"), ("bf16", "in_backward")])
@pytest.mark.slow
def test_texts_of_many_lengths_take_the_memory_of_the_longest(threaded, precision, update):
    def taken(shapes):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compiled(model, precision=precision, update=update, optimizer=optimizer)
        session, most = None, 0
        for rows, length in shapes:
            step(torch.randint(32, (rows, length))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session = session or session_of(step)
            memory = session.server._memory._pool.size + session.device.pinned.used
            most = max(most, memory)
        return most

    threaded.delay = 0.0
    largest = taken([(max(ROWS), max(LENGTHS))] * 3)
    in_turn = taken([(rows, length) for _ in range(20) for length in LENGTHS for rows in ROWS])
    ring = ring_bytes(None)
    assert in_turn - ring < 1.2 * (largest - ring)


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
        return wait.done + len(late)

    staging = Staging(memory, record, wait)
    sources = [torch.randn(entries) for entries in (700_001, 3, 64, 30_000, *range(1, 20_000, 777), 100_000)]
    targets = [torch.zeros(source.nbytes, dtype=torch.uint8) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        staging.send(source, target.as_subclass(Device))
    assert len(sent) < len(sources) + 4 * 700_001 / (1 << 17)
    wait(record())
    assert all(torch.equal(target.view(torch.float32), source) for source, target in zip(sources, targets, strict=True))


def test_small_tensors_share_a_slot_of_the_ring():
    """A hundred norms wait for nothing."""
    waits = []
    staging = Staging(memory_of(None)[0], lambda: "a copy", waits.append)
    for _ in range(100):
        staging.send(torch.ones(64), torch.zeros(256, dtype=torch.uint8))
    assert waits == []


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


def mappings():
    """Mappings of this process; the kernel allows 65,530."""
    return sum(1 for _ in open("/proc/self/maps"))


def test_kept_losses_take_no_buffer_each(threaded):
    """A long run that collects its losses would come to the limit of mappings."""
    threaded.delay = 0.0
    step = compiled(Stack(2).double())
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    kept, before = [], None
    for turn in range(40):
        loss = step(x).sum(-1)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        kept += [loss.detach(), gradient]
        if turn == 4:
            before = mappings(), threaded.devices[-1].pinned.used
    assert mappings() <= before[0] + 10
    assert threaded.devices[-1].pinned.used == before[1]
