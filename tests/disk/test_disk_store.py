"""Tensors in a file: ordinary tensors, read through a mapping, and few of their pages by samples."""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from l2l_compile import L2LError
from l2l_compile.disk.disk_store import DiskStore, await_writes, range_of, whole_spans
from l2l_compile.disk.disk_threads import DiskBlock, DiskThreads
from l2l_compile.disk.stored_entries import moved_to_disk, read_entries, sample, write_entries
from l2l_compile.host.updates.deferred import DeferredWriteGuard
from l2l_compile.host.wire import Wire, same_sample, same_samples
from l2l_compile.memory.pages import PinnedMemory, pages
from slow_disk import Faults, holders, is_freed_within, slow_disk

ENTRIES = 4 << 20  # 16 MiB


def pages_in_memory(tensor: torch.Tensor) -> int:
    """Pages of a mapping that the system holds."""
    count = -(-tensor.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    done = ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found)
    assert done == 0
    return sum(each & 1 for each in found)


@pytest.fixture
def store(tmp_path):
    return DiskStore(str(tmp_path))


def test_a_mapping_sees_writes_and_a_read_sees_the_mapping(store):
    given = torch.randn(5000)
    tensor = moved_to_disk(store, given)
    assert torch.equal(tensor, given)
    tensor.mul_(2)
    (span,), size = whole_spans([tensor])
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    store.read([span], buffer).wait()
    assert torch.equal(buffer[: tensor.nbytes].view(torch.float32), 2 * given)


def test_a_sample_of_what_is_being_written_waits_for_no_disk(tmp_path):
    """It is taken from the buffer: bits are those that the disk will have, and no byte is read."""
    faults = Faults()
    with slow_disk(faults):
        store = DiskStore(str(tmp_path))
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    (span,), size = whole_spans([tensor])
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    buffer.view(torch.float32).copy_(torch.arange(ENTRIES))
    faults.rate, before = 2e7, store.read_bytes
    store.write([span], buffer)
    start = time.perf_counter()
    positions, (found,) = sample([tensor], 0)
    assert time.perf_counter() - start < 0.4 and store.read_bytes == before, "the write takes 0.8 s"
    assert range_of(tensor).writes and torch.equal(found, positions.float())
    await_writes(tensor)
    assert not range_of(tensor).sources and torch.equal(sample([tensor], 0)[1][0], found)


def test_tensors_are_saved_as_their_entries_alone(store):
    tensors = [moved_to_disk(store, torch.randn(3000)) for _ in range(3)]
    file = io.BytesIO()
    torch.save(tensors[1], file)
    assert file.tell() < 3000 * 4 + 2000 and len({t.untyped_storage().data_ptr() for t in tensors}) == 3
    file.seek(0)
    assert torch.equal(torch.load(file), tensors[1]) and range_of(torch.load(io.BytesIO(file.getvalue()))) is None


def test_samples_of_a_forward_read_few_pages(store):
    """Every 251st entry would be on every page of the file."""
    given = torch.randn(ENTRIES)
    tensor = moved_to_disk(store, given)
    read = store.read_bytes
    for generation in range(2):
        assert same_sample(given, tensor, generation)
    assert pages_in_memory(tensor) == 0 and store.read_bytes - read == 2 * 4 * mmap.PAGESIZE


def transfers_of(store, monkeypatch):
    """Of every read from now on, how many spans it has, and its options."""
    transfers, read = [], store.read
    monkeypatch.setattr(
        store, "read", lambda spans, *rest, **how: transfers.append((len(spans), how)) or read(spans, *rest, **how)
    )
    return transfers


def test_samples_of_several_tensors_wait_for_one_transfer(store, monkeypatch):
    """One behind the other, each would wait for the blocks of updates that are being read."""
    given = [torch.randn(ENTRIES >> 4) for _ in range(5)]
    stored = [moved_to_disk(store, each) for each in given]
    transfers = transfers_of(store, monkeypatch)
    stored[3].data.mul_(0.5)
    assert same_samples(zip(given, stored, strict=True), 0) == [True, True, True, False, True]
    assert transfers == [(5 * 4, {"is_update": False})]


def test_a_wire_looks_at_what_is_on_disk_in_one_transfer(store, monkeypatch):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    given = [torch.randn(ENTRIES >> 4) for _ in parameters]
    for parameter, values in zip(parameters[:3], given, strict=False):
        parameter.data = moved_to_disk(store, values)
    parameters[3].data = given[3].clone()
    wire = Wire(parameters, [torch.bfloat16] * 4, PinnedMemory(0, None, None))
    wire.refresh(1)
    for copy in wire.copies:
        copy.written()
    parameters[1].data.mul_(0.5)
    parameters[3].data.mul_(0.5)
    transfers = transfers_of(store, monkeypatch)
    wire.refresh(2)
    assert transfers == [(3 * 4, {"is_update": False})]
    assert all(
        torch.equal(view, (values * factor).bfloat16())
        for view, values, factor in zip(wire.views, given, (1, 0.5, 1, 0.5), strict=True)
    )


def test_samples_find_a_write_to_all_entries_in_each_forward(store):
    given = torch.randn(ENTRIES)
    tensor = moved_to_disk(store, given)
    tensor.data.mul_(0.5)
    assert not any(same_sample(given, tensor, generation) for generation in range(5))


def test_samples_of_a_part_of_a_tensor_are_of_this_part(store):
    given = torch.randn(40_000)
    part = moved_to_disk(store, given)[1_001:30_003]
    assert same_sample(given[1_001:30_003].bfloat16(), part, 3) and not same_sample(given[1_000:30_002], part, 3)


@pytest.mark.parametrize("entries", [1, 10, 1023])
def test_samples_of_less_than_a_page_are_all_of_it(entries, store):
    given = torch.randn(entries)
    tensor = moved_to_disk(store, given)
    assert same_sample(given, tensor, 7)
    tensor.data[-1] += 1
    assert not same_sample(given, tensor, 8)


def test_other_pages_are_compared_in_each_forward(store):
    tensor = moved_to_disk(store, torch.zeros(64 << 10))
    found = torch.cat([sample([tensor], generation)[0] for generation in range(16)])
    assert torch.equal(found.sort().values, torch.arange(64 << 10))


def test_samples_of_a_step_that_is_put_off_read_few_pages(store, monkeypatch):
    """1,024 entries of each parameter are on 1,024 pages."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = moved_to_disk(store, torch.randn(ENTRIES))
    other = torch.nn.Parameter(moved_to_disk(store, torch.randn(ENTRIES)))
    guard = DeferredWriteGuard(torch.optim.SGD([parameter, other], lr=1.0), [parameter, other])
    transfers = transfers_of(store, monkeypatch)
    guard.check([parameter, other])
    assert transfers == [(2, {"is_update": False})] and pages_in_memory(parameter) == 0
    parameter.data.mul_(0.5)
    with pytest.raises(L2LError, match="was written while its update was still to come"):
        guard.check([other, parameter])


def test_await_writes_waits_for_the_range_alone(tmp_path):
    with slow_disk(Faults(rate=5e4)):
        store = DiskStore(str(tmp_path))
        written, other = (moved_to_disk(store, torch.zeros(20_000)) for _ in range(2))
        (span,), size = whole_spans([written])
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        buffer.view(torch.float32).fill_(3.0)
        store.write([span], buffer)
        start = time.perf_counter()
        await_writes(other)
        assert time.perf_counter() - start < 0.8
        assert torch.equal(await_writes(written), torch.full((20_000,), 3.0)) and time.perf_counter() - start > 1.2


KILLED = """
import os, sys, time, torch
from l2l_compile.disk.disk_store import DiskStore
from l2l_compile.disk.stored_entries import moved_to_disk
store = DiskStore(sys.argv[1])
store.reserve(256 << 20)
kept = [moved_to_disk(store, torch.ones(1 << 20)) for _ in range(8)]
print("ready", flush=True)
while True:
    kept[0] = moved_to_disk(store, kept[0])
"""


def test_a_killed_process_leaves_no_file_and_no_space_taken(tmp_path):
    running = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "ready\n"
    assert holders(tmp_path)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert is_freed_within(1.0, tmp_path) and os.listdir(tmp_path) == []


def test_entries_are_written_behind_a_write_that_is_under_way(store, monkeypatch):
    """A disk may do one of two writes first."""
    tensor = store.empty(torch.Size([1 << 20]), torch.float32)
    (span,), size = whole_spans([tensor])
    go, write, waits = threading.Event(), store.file.write, [True]

    def written(*given):
        if waits:
            waits.pop()
            go.wait()
        write(*given)

    monkeypatch.setattr(store.file, "write", written)
    store.write([span], pages(size, "a test").fill_(1))
    later = threading.Thread(target=write_entries, args=(tensor, 1 << 18, torch.arange(1 << 18, dtype=torch.float64)))
    later.start()
    later.join(0.3)
    assert later.is_alive(), "it waits"
    go.set()
    later.join()
    store.settle()
    assert torch.equal(tensor[1 << 18 : 1 << 19], torch.arange(1 << 18, dtype=torch.float32))
    assert torch.equal(read_entries(tensor, slice(3, 1 << 19)), tensor[3 : 1 << 19])


def test_urgent_blocks_are_taken_before_others():
    """Fetches wait for no read ahead."""
    threads, order, go = DiskThreads(1, "test"), [], threading.Event()
    first = threads.submit([DiskBlock(go.wait)])
    last = [threads.submit([DiskBlock(functools.partial(order.append, n))], is_urgent=n > 3) for n in range(6)]
    go.set()
    for transfer in (first, *last):
        transfer.wait()
    assert order == [4, 5, 0, 1, 2, 3]
