"""A forked process reads what its parent has on disk, and writes nothing: it has no disk threads, and its parent goes on."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import traceback

import pytest
import torch

from l2l_compile import DiskError
from l2l_compile.disk import disk_threads
from l2l_compile.disk.disk_store import DiskStore, await_writes, whole_spans
from l2l_compile.disk.stash_store import StashStore
from l2l_compile.disk.stored_entries import moved_to_disk, sample, write_entries
from l2l_compile.disk.versions import VersionedStore
from slow_disk import Faults, slow_disk

REFUSED = "a forked process has the disk files of its parent"
ENTRIES = 20_000


def passes_in_a_child(work) -> bool:
    """Whether `work` returns in a forked process, within five seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def whole(tensor):
    """A span of all of a tensor, and a buffer for it."""
    (span,), size = whole_spans([tensor])
    return [span], torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def test_a_fork_waits_for_what_is_being_written(tmp_path):
    with slow_disk(Faults(rate=1e6)):
        store = DiskStore(str(tmp_path))
        tensor = moved_to_disk(store, torch.zeros(ENTRIES))
        spans, buffer = whole(tensor)
        buffer.view(torch.float32).fill_(3.0)
        store.write(spans, buffer)

        def look():
            assert torch.equal(await_writes(tensor), torch.full((ENTRIES,), 3.0))

        assert passes_in_a_child(look)


def test_a_forked_process_reads_as_its_parent(tmp_path):
    store = DiskStore(str(tmp_path))
    tensor = moved_to_disk(store, torch.full((ENTRIES,), 3.0))
    spans, buffer = whole(tensor)

    def look():
        store.read(spans, buffer, is_update=False).wait()
        assert torch.equal(buffer[: tensor.nbytes].view(torch.float32), tensor)
        assert sample([tensor], 0)[1][0].eq(3.0).all()

    assert passes_in_a_child(look)


def test_updates_in_a_forked_process_are_refused(tmp_path):
    """Also by a store of its own, for tensors that are in its parent's file. What has failed there is not told as the parent's failure."""
    told = []
    store = DiskStore(str(tmp_path), failed=told.append)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    spans, buffer = whole(tensor)

    def train():
        for read_or_write in (store.read, store.write, DiskStore(str(tmp_path)).write):
            with pytest.raises(DiskError, match=REFUSED):
                read_or_write(spans, buffer)
        with pytest.raises(DiskError, match=REFUSED):
            write_entries(tensor, 0, torch.ones(ENTRIES))
        store._fail(DiskError("a test"))
        assert not told

    assert passes_in_a_child(train) and not tensor.any()
    store.write(spans, buffer.fill_(1)).wait()
    assert tensor.all(), "the parent goes on"


def test_stashes_of_a_forked_process_are_refused(tmp_path):
    """The buffers of its parent are not there either."""
    store = StashStore(str(tmp_path))
    odd = torch.randn(ENTRIES)[1:]
    store.settle_writes([store.write_tensor(odd, store.extent(4 * ENTRIES))])

    def stash():
        with pytest.raises(DiskError, match=REFUSED):
            store.write_tensor(odd, store.extent(4 * ENTRIES))

    assert passes_in_a_child(stash)


def test_a_forked_process_commits_nothing(tmp_path):
    store = VersionedStore(str(tmp_path))
    tensor = moved_to_disk(store, torch.ones(ENTRIES))
    spans, buffer = whole(tensor)
    ranges = [span.range for span in spans]
    store.begin_commit(ranges, lambda places: {"step": 1})
    store.await_commit()
    manifest = (tmp_path / "l2l-store.manifest").read_bytes()

    def commit():
        with pytest.raises(DiskError, match=REFUSED):
            store.begin_commit(ranges, lambda places: {"step": 2})
        with pytest.raises(DiskError, match=REFUSED):
            store.drop("a")
        with pytest.raises(DiskError, match=REFUSED):
            DiskStore(str(tmp_path)).write(spans, buffer)

    assert passes_in_a_child(commit) and (tmp_path / "l2l-store.manifest").read_bytes() == manifest


def test_transfers_of_the_parent_hold_up_no_child(tmp_path, monkeypatch):
    """Threads that give transfers all the time let a fork go on after a while. The child cannot wait for what is under way."""
    monkeypatch.setattr(disk_threads, "_PATIENCE", 0.0)
    with slow_disk(Faults(rate=5e4)):
        store = DiskStore(str(tmp_path))
        tensor = moved_to_disk(store, torch.zeros(ENTRIES))
        spans, buffer = whole(tensor)
        store.write(spans, buffer.fill_(1))

        def look():
            with pytest.raises(DiskError, match=REFUSED):
                await_writes(tensor)
            monkeypatch.undo()
            assert passes_in_a_child(lambda: None), "nor does it wait when it is forked itself"

        assert passes_in_a_child(look)
        await_writes(tensor)
        assert tensor.all()
