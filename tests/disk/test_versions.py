"""Tensors with two places in a file: writes leave the last commit as it is, and a new store finds what was committed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time

import pytest
import torch

from l2l_compile import DiskError
from l2l_compile.disk import manifest
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import StoredSpan, await_writes, range_of
from l2l_compile.disk.run_files import DATA
from l2l_compile.disk.stored_entries import moved_to_disk, some_entries
from l2l_compile.disk.versioned_range import StoredPlace, VersionedRange
from l2l_compile.disk.versions import VersionedStore
from l2l_compile.memory.pages import pages
from slow_disk import Faults, slow_disk

ENTRIES = 4 * PAGE // 4


def write(store, tensor, value, parts=1):
    """Write a value into all entries, in parts; returns the transfers."""
    found, size = range_of(tensor), tensor.nbytes // parts
    transfers = []
    for number in range(parts):
        buffer = pages(size, "a test")
        buffer.view(torch.float32).fill_(value)
        transfers.append(store.write([StoredSpan(found, number * size, size, 0)], buffer, lambda _, kept=(buffer, tensor): None))
    return transfers


def read(store, tensor):
    buffer = pages(tensor.nbytes, "a test")
    store.read([StoredSpan(range_of(tensor), 0, tensor.nbytes, 0)], buffer).wait()
    return buffer.view(torch.float32)


def commit(store, *tensors, contents=lambda places: [(p.start, p.size) for p in places]):
    store.begin_commit([range_of(t) for t in tensors], contents)
    store.await_commit()


def committed(folder):
    """The tensors of the last commit, as another process would find them."""
    store = VersionedStore(shutil.copytree(folder, f"{folder}-left"))
    return [store.again(StoredPlace(*place), torch.Size([ENTRIES]), torch.float32).clone() for place in store.contents]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


@pytest.mark.parametrize("parts", [1, 4])
def test_writes_behind_a_commit_leave_it_as_it_is(parts, folder):
    """The tensor, a direct read and a sample have the newest bytes each time. Its address stays the same."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    address = tensor.data_ptr()
    for value in range(1, 6):
        commit(store, tensor)
        if value == 4:
            write(store, tensor, 99.0)  # written twice before the next commit
            await_writes(tensor)
        write(store, tensor, float(value), parts)
        assert torch.equal(await_writes(tensor), torch.full((ENTRIES,), float(value)))
        assert bool((read(store, tensor) == value).all()) and bool((some_entries(tensor, 0) == value).all())
        assert tensor.data_ptr() == address
    del store, tensor
    assert bool((committed(folder)[0] == 4.0).all())


def test_a_reader_waits_until_the_tensor_is_mapped_anew(folder, monkeypatch):
    store, landing, landed = VersionedStore(folder), threading.Event(), VersionedRange.landed
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    commit(store, tensor)

    def slowly(self, start, size):
        landing.set()
        time.sleep(0.2)
        landed(self, start, size)

    monkeypatch.setattr(VersionedRange, "landed", slowly)
    write(store, tensor, 1.0)
    assert landing.wait(30) and bool((await_writes(tensor) == 1.0).all())


def test_a_part_that_has_landed_is_read_from_where_it_is(folder):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    commit(store, tensor)
    buffer = pages(PAGE, "a test")
    buffer.view(torch.float32).fill_(7.0)
    store.write([StoredSpan(range_of(tensor), PAGE, PAGE, 0)], buffer).wait()
    part = PAGE // 4
    assert read(store, tensor)[::part].tolist() == [0.0, 7.0, 0.0, 0.0] and tensor[::part].tolist() == [0.0] * 4
    store.begin_commit([range_of(tensor)], lambda places: None)
    with pytest.raises(DiskError, match="has written 4096 of 16384 bytes of a tensor"):
        store.await_commit()


def test_writes_wait_for_the_commit_of_the_step_before(folder):
    """Until the manifest of 2.0 is there, that of 1.0 holds, and 3.0 would be written into its place."""
    store, goes_on = VersionedStore(folder), threading.Event()
    tensor = moved_to_disk(store, torch.ones(ENTRIES))
    commit(store, tensor)
    write(store, tensor, 2.0)

    def contents(places):
        assert goes_on.wait(30)
        return [(p.start, p.size) for p in places]

    store.begin_commit([range_of(tensor)], contents)
    (transfer,) = write(store, tensor, 3.0)
    time.sleep(0.2)
    of_first = manifest.read_manifest(folder)["contents"][0]
    buffer = pages(PAGE, "a test")
    store.file.read(memoryview(buffer.numpy()), of_first[0])
    assert not transfer.is_done and bool((buffer.view(torch.float32) == 1.0).all())
    goes_on.set()
    transfer.wait()
    assert bool((tensor == 3.0).all()) and manifest.read_manifest(folder)["contents"][0] != of_first


def test_a_commit_waits_for_writes_on_a_slow_disk(folder):
    with slow_disk(Faults(rate=2e5)):
        store = VersionedStore(folder)
        tensor = moved_to_disk(store, torch.ones(ENTRIES))
        commit(store, tensor)
        write(store, tensor, 2.0, parts=4)
        commit(store, tensor)
    del store, tensor
    assert bool((committed(folder)[0] == 2.0).all())


def test_places_that_a_manifest_names_are_not_used_again(folder):
    """A tensor that is gone leaves its places when a commit without it is done."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.ones(ENTRIES))
    commit(store, tensor)
    places = set(range_of(tensor).places)
    del tensor
    second = moved_to_disk(store, torch.full((ENTRIES,), 2.0))
    assert places.isdisjoint(range_of(second).places)
    commit(store, second)
    third = moved_to_disk(store, torch.full((ENTRIES,), 3.0))
    assert set(range_of(third).places) == places
    del store, second, third
    assert bool((committed(folder)[0] == 2.0).all())


def test_places_without_a_commit_are_free_in_the_next_process(folder):
    store = VersionedStore(folder)
    gone, tensor = (moved_to_disk(store, torch.full((ENTRIES,), value)) for value in (2.0, 1.0))
    commit(store, tensor)
    size = store.file.size
    del store, tensor, gone
    store = VersionedStore(folder)
    (first,) = (store.again(StoredPlace(*place), torch.Size([ENTRIES]), torch.float32) for place in store.contents)
    other = moved_to_disk(store, torch.full((ENTRIES,), 5.0))
    assert (
        store.file.size == size
        and range_of(other).newest != range_of(first).newest
        and bool((first == 1.0).all())
        and bool((other == 5.0).all())
    )


def test_a_run_without_a_commit_begins_anew(folder):
    store = VersionedStore(folder)
    moved_to_disk(store, torch.ones(ENTRIES))
    del store
    assert VersionedStore(folder).contents is None


@pytest.mark.parametrize(
    ("what", "done", "number"),
    [("_sync", "made durable", errno.EIO), ("write", "of the manifest of a step were written", errno.ENOSPC)],
)
def test_a_commit_that_fails_leaves_the_one_before(what, done, number, folder, monkeypatch):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.ones(ENTRIES))
    commit(store, tensor)
    write(store, tensor, 2.0)

    def fails(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*((store.file.files[0], "_sync") if what == "_sync" else (manifest.os, "write")), fails)
        store.begin_commit([range_of(tensor)], lambda places: None)
        with pytest.raises(
            DiskError, match=f"{folder}.*: {os.strerror(number)} while .* {done}. .* resumes from the last complete one"
        ):
            store.await_commit()
    (transfer,) = write(store, tensor, 3.0)
    with pytest.raises(DiskError, match=os.strerror(number)):
        transfer.wait()
    assert not [name for name in os.listdir(folder) if name.endswith(".new")]
    del store, tensor, transfer
    assert bool((committed(folder)[0] == 1.0).all())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("l2l-store.manifest", lambda text: text[:-1], "l2l-store.manifest is damaged, as its checksum shows"),
        ("l2l-store.manifest", lambda text: text[:300] + b"x" + text[301:], "is damaged"),
        ("l2l-store.manifest", lambda text: b"", "is damaged"),
        ("l2l-store.manifest", lambda text: text.replace(b"manifest 2", b"manifest 1", 1), "has format '1', .* reads format '2'"),
        (DATA, lambda text: text[:-PAGE], f"{DATA} has .* in place of"),
        (DATA, lambda text: bytes(len(text)), f"{DATA} is of another run"),
    ],
)
def test_files_that_are_damaged_are_an_error(name, change, said, folder):
    store = VersionedStore(folder)
    commit(store, moved_to_disk(store, torch.ones(ENTRIES)))
    del store
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        text = change(file.read())
    with open(path, "wb") as file:
        file.write(text)
    with pytest.raises(DiskError, match=said):
        VersionedStore(folder)


def test_a_manifest_without_its_data_is_an_error(folder):
    store = VersionedStore(folder)
    commit(store, moved_to_disk(store, torch.ones(ENTRIES)))
    del store
    os.unlink(os.path.join(folder, DATA))
    with pytest.raises(DiskError, match=f"{DATA} is missing, so .*l2l-store.manifest is not of it"):
        VersionedStore(folder)
    assert sorted(os.listdir(folder)) == ["l2l-store.lock", "l2l-store.manifest"], "nothing was made"


def test_a_second_process_is_kept_out_by_name(folder):
    """A process that was forked, such as a worker of a data loader, keeps nobody out when its parent has ended."""
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        store = VersionedStore(folder)
        child = os.fork()
        if child == 0:
            os.write(write_end, f"{os.getpid()}\n".encode())  # it has given the lock back by now
            time.sleep(30)
            os._exit(0)
        time.sleep(30)
        os._exit(int(store.contents is not None))
    child = int(os.read(read_end, 20))
    try:
        with pytest.raises(DiskError, match=f"{folder}: process {parent} on .* trains in this folder"):
            VersionedStore(folder)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert VersionedStore(folder).contents is None
    finally:
        os.kill(child, signal.SIGKILL)
