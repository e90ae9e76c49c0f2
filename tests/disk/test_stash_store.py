"""Extents for the stashes of forwards, and tensors of any size, place and dtype in them."""

from __future__ import annotations

import errno
import gc
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2l_compile import DiskError
from l2l_compile.disk.stash_store import FreeExtents, StashStore
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.memory.pages import pages
from slow_disk import Faults, slow_disk

PAGE = mmap.PAGESIZE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60), st.randoms(use_true_random=False))
def test_free_extents_are_joined_and_never_given_twice(steps, choice):
    """Against a model with a flag for each byte."""
    size = 24
    extents, free, taken = FreeExtents(), [True] * size, []
    extents.give(0, size)
    for takes, count in steps:
        if takes:
            fits = [start for start in range(size - count + 1) if all(free[start : start + count])]
            start = extents.take(count)
            assert start == (min(fits) if fits else None), "the first part that has room"
            if start is not None:
                free[start : start + count] = [False] * count
                taken.append((start, count))
        elif taken:
            start, count = taken.pop(choice.randrange(len(taken)))
            extents.give(start, count)
            free[start : start + count] = [True] * count
    for start, count in taken:
        extents.give(start, count)
    assert extents.take(size) == 0, "all of it is one part again"


def read(store: StashStore, stored) -> torch.Tensor:
    memory = pages(stored.range.size, "a test")
    store.read_into(stored, memory).wait()
    return memory[: stored.nbytes].view(stored.dtype).view(stored.shape)


TENSORS = {
    "one entry": lambda: torch.randn(1),
    "a page": lambda: torch.randn(PAGE // 4),
    "blocks and a part": lambda: torch.randn(5 * BLOCK // 8 + 3),
    "not on a page": lambda: torch.randn(BLOCK // 2 + 1)[1:],
    "on a page, with a part of one": lambda: pages(3 * PAGE, "a test").view(torch.float32).normal_()[: 2 * PAGE // 4 + 5],
    "transposed": lambda: torch.randn(300, 40).t(),
    "bf16": lambda: torch.randn(7, 1001).to(torch.bfloat16),
    "bool": lambda: torch.randn(9999) > 0,
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("rate", [None, 3e7])
def test_a_tensor_comes_back_as_it_was(make, rate, tmp_path):
    tensor = make()
    with slow_disk(Faults(rate=rate)):
        store = StashStore(str(tmp_path))
        extent = store.extent(2 * (tensor.nbytes + PAGE))
        one, other = store.write_tensor(tensor, extent), store.write_tensor(tensor.logical_not(), extent)
        assert torch.equal(read(store, one), tensor) and torch.equal(read(store, other), tensor.logical_not())


def test_an_extent_is_free_when_its_last_tensor_is_gone(tmp_path):
    store = StashStore(str(tmp_path))
    extent = store.extent(64 * PAGE)
    kept, gone = (store.write_tensor(torch.randn(100), extent) for _ in range(2))
    store.settle()
    del extent, gone
    gc.collect()
    assert store.extent(PAGE).start == 64 * PAGE, "one tensor is there"
    del kept
    gc.collect()
    assert store.extent(64 * PAGE).start == 0 and store.extent(PAGE).start == 64 * PAGE


def test_an_extent_stays_as_long_as_a_write_into_it(tmp_path):
    """Also if nobody has the tensor any more: the place would be written by two."""
    with slow_disk(Faults(rate=1e6)):
        store = StashStore(str(tmp_path))
        store.write_tensor(torch.randn(100_000), store.extent(100 * PAGE))
        gc.collect()
        assert store.extent(100 * PAGE).start == 100 * PAGE
        store.settle()
        gc.collect()
        assert store.extent(100 * PAGE).start == 0


def test_a_larger_extent_takes_the_free_end_of_the_file(tmp_path):
    store = StashStore(str(tmp_path))
    store.extent(50 * PAGE)
    gc.collect()
    made = store.extent(80 * PAGE)
    assert made.start == 0 and store.file.size == 80 * PAGE


def test_what_is_free_stays_so_if_the_disk_has_no_room(tmp_path):
    with slow_disk(Faults(room=64 * PAGE)):
        store = StashStore(str(tmp_path))
        store.extent(50 * PAGE)
        gc.collect()
        with pytest.raises(DiskError, match="No space left on device while .* inputs of layers"):
            store.extent(80 * PAGE)
        assert store.extent(50 * PAGE).start == 0


def test_a_write_that_fails_is_an_error_of_every_later_call(tmp_path):
    with slow_disk(Faults(write_fails=(errno.EIO, 0))):
        store = StashStore(str(tmp_path))
        stored = store.write_tensor(torch.randn(1000), store.extent(10 * PAGE))
        for _ in range(2):
            with pytest.raises(
                DiskError, match=r"Input/output error .* inputs of layers \(stash='disk'\) were written. The step is lost"
            ):
                store.settle_writes([stored])
        with pytest.raises(DiskError):
            store.check()
