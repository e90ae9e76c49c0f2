"""Versions that are kept in a file: whatever is done behind them, and wherever a process ends, they have the bytes of their step."""

from __future__ import annotations

import os
import random
import shutil
import struct

import pytest
import torch
from test_versions import ENTRIES, commit, read, write

from l2l_compile import DiskError
from l2l_compile.disk import manifest, written_pages
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import await_writes
from l2l_compile.disk.manifest import names_of_versions, read_manifest
from l2l_compile.disk.run_files import DATA, HEADER
from l2l_compile.disk.stored_entries import moved_to_disk
from l2l_compile.disk.versioned_range import StoredPlace
from l2l_compile.disk.versions import VersionedStore
from l2l_compile.memory.finalizers import members
from slow_disk import Faults, slow_disk


def keep(store, tensor, version):
    """As updates do it: behind the writes of the step, which decide how much room there is."""
    await_writes(tensor)
    store.make_room_for_a_version()
    commit(store, tensor)
    store.keep(version)


def values_of(folder, version=None):
    """The first and the last entry of each tensor that a manifest names, read from the files, beside all stores."""
    found = []
    with open(os.path.join(folder, DATA), "rb") as file:
        for start, size, _ in read_manifest(str(folder), version)["places"]:
            file.seek(HEADER + start)
            entries = torch.frombuffer(bytearray(file.read(size)), dtype=torch.float32)
            found.append((float(entries[0]), float(entries[-1])))
    return found


def is_whole(folder, value, version=None):
    return values_of(folder, version) == [(value, value)]


@pytest.fixture
def folder(tmp_path):
    (made := tmp_path / "run").mkdir()
    return str(made)


def test_kept_versions_stay_as_later_steps_write(folder):
    """All of them, if every step is kept. Keeping writes the manifest alone."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    for value in range(6):
        write(store, tensor, float(value))
        await_writes(tensor)
        before = store.written_bytes
        keep(store, tensor, f"step-{value}")
        assert store.written_bytes - before == sum(
            os.path.getsize(manifest.path_of_manifest(folder, v)) for v in (None, f"step-{value}")
        )
    for value in range(6):
        assert is_whole(folder, value, f"step-{value}")
    assert store.file.size <= 8 * tensor.nbytes + 20 * PAGE


def test_a_name_that_is_kept_again_has_the_later_step(folder):
    """The places of the earlier one are used again: the file does not grow from the second time on."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    sizes = []
    for value in range(5):
        write(store, tensor, float(value))
        keep(store, tensor, "best")
        assert is_whole(folder, value, "best") and names_of_versions(folder) == ["best"]
        sizes.append(store.file.size)
    assert sizes[1] == sizes[4]


def test_a_write_of_the_user_does_not_reach_a_version(folder):
    """It belongs to the next commit, by a read from the file as well."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    keep(store, tensor, "a")
    tensor[7] = 5.0
    store.carry_writes()
    assert read(store, tensor)[7] == 5.0 and tensor[7] == 5.0 and not read(store, tensor)[8]
    tensor[-1] = 6.0  # into its own place now
    commit(store, tensor)
    assert is_whole(folder, 0.0, "a") and values_of(folder) == [(0.0, 6.0)]


def test_nothing_is_written_where_the_user_has_not(folder):
    """Also if all entries were read through the mapping."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    keep(store, tensor, "a")
    before = store.written_bytes
    assert not tensor.sum()
    store.carry_writes()
    assert store.written_bytes == before


@pytest.mark.parametrize(
    ("flags", "is_own"),
    [((), False), ((61,), False), ((63, 61), False), ((63, 61, 56), False), ((63,), True), ((63, 55), True), ((62,), True)],
)
def test_pages_that_the_kernel_gives_a_process_are_found(flags, is_own, monkeypatch):
    """Present (63) and not of a file (61), or swapped (62): the last of a few pages."""
    entries = [1 << 63 | 1 << 61, 0, sum(1 << flag for flag in flags)]
    monkeypatch.setattr(written_pages.os, "pread", lambda *_: struct.pack("<3Q", *entries))
    assert written_pages.is_written(16 * PAGE, 3 * PAGE) == is_own


def test_the_space_of_a_dropped_version_is_used_again(folder):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    sizes = []
    for value in range(6):
        write(store, tensor, float(value))
        keep(store, tensor, f"step-{value}")
        sizes.append(store.file.size)
        if value > 0:
            store.drop(f"step-{value - 1}")
    assert sizes[1] == sizes[5] and names_of_versions(folder) == ["step-5"] and is_whole(folder, 5.0, "step-5")


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_version_without_room_changes_nothing(is_dropped, folder):
    """Later steps are committed, and a version has room again when one is dropped."""
    with slow_disk(Faults(room=3 * ENTRIES * 4 + 17 * PAGE)):
        store = VersionedStore(folder)
        tensor = moved_to_disk(store, torch.zeros(ENTRIES))
        keep(store, tensor, "first")
        for value in (1.0, 2.0):
            write(store, tensor, value)
            await_writes(tensor)
            with pytest.raises(DiskError, match=f"{folder}: No space left .*, or drop a version"):
                store.make_room_for_a_version()
            commit(store, tensor)
        if is_dropped:
            store.drop("first")
            write(store, tensor, 3.0)
            keep(store, tensor, "second")
        assert is_whole(folder, 3.0 if is_dropped else 2.0) and (is_dropped or is_whole(folder, 0.0, "first"))


@pytest.mark.parametrize("version", ["one", "three", None])
def test_a_process_goes_on_from_any_version(version, folder):
    """The last step stays until the first commit, which takes its place. The other versions stay."""
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    for value in range(1, 5):
        write(store, tensor, float(value))
        keep(store, tensor, {1: "one", 3: "three"}[value]) if value % 2 else commit(store, tensor)
    size = store.file.size
    del store, tensor
    store = VersionedStore(folder, version=version)
    (place,) = store.manifest["places"]
    tensor = store.again(StoredPlace(*place), torch.Size([ENTRIES]), torch.float32)
    assert bool((tensor == {"one": 1.0, "three": 3.0, None: 4.0}[version]).all())
    for value in (10.0, 11.0, 12.0):
        write(store, tensor, value)
        assert bool((await_writes(tensor) == value).all()) and is_whole(folder, 4.0 if value == 10.0 else value - 1)
        commit(store, tensor)
        assert is_whole(folder, value) and is_whole(folder, 1.0, "one") and is_whole(folder, 3.0, "three")
    assert store.file.size == size, "no more places than before"


def test_a_version_that_is_not_there_is_named_with_the_others(folder):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    keep(store, tensor, "a")
    with pytest.raises(DiskError, match="has no version 'b', but 'a': name one of them"):
        store.drop("b")
    del store, tensor
    with pytest.raises(DiskError, match="has no version 'b', but 'a': name one of them"):
        VersionedStore(folder, version="b")


def test_versions_without_the_last_manifest_are_not_removed(folder):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    keep(store, tensor, "a")
    del store, tensor
    os.unlink(manifest.path_of_manifest(folder))
    with pytest.raises(DiskError, match="l2l-store.manifest is missing, and 'a' of its run are there"):
        VersionedStore(folder)
    assert os.path.exists(os.path.join(folder, DATA))


def test_a_damaged_version_is_an_error_that_says_what_is_lost(folder):
    store = VersionedStore(folder)
    tensor = moved_to_disk(store, torch.zeros(ENTRIES))
    keep(store, tensor, "a")
    del store, tensor
    with open(path := manifest.path_of_manifest(folder, "a"), "r+b") as file:
        file.truncate(200)
    with pytest.raises(DiskError, match=f"{path} is damaged.*: put back a copy of it, or remove it, which drops the version"):
        VersionedStore(folder)
    os.unlink(path)
    assert VersionedStore(folder).contents is not None


# ---- where a process ends ----------------------------------------------------------------------------------------------


def test_an_end_at_any_call_leaves_versions_whole(folder, tmp_path, monkeypatch):
    """Steps, keeping, keeping under a name again, dropping: before and behind each call that changes a file, as a kill would leave them."""
    store = VersionedStore(folder)
    tensor, left = moved_to_disk(store, torch.zeros(ENTRIES)), []

    def watched(function):
        def call(*arguments, **named):
            leave()
            found = function(*arguments, **named)
            leave()
            return found

        return call

    def leave():
        left.append((shutil.copytree(folder, tmp_path / str(len(left))), dict(allowed)))

    allowed: dict = {None: {None}}  # by version, its values: None if it may be missing
    for name in ("replace", "unlink", "write", "fsync"):
        monkeypatch.setattr(manifest.os, name, watched(getattr(os, name)))
    monkeypatch.setattr(store.file.files[0], "_pwritev", watched(store.file.files[0]._pwritev))
    monkeypatch.setattr(store.file.files[0], "_allocate", watched(store.file.files[0]._allocate))

    def step(value, version=None):
        before = allowed[None]
        allowed[None] = before | {value}
        if version is not None:
            allowed[version] = allowed.get(version, {None}) | {value}
        write(store, tensor, value)
        keep(store, tensor, version) if version is not None else commit(store, tensor)
        allowed[None] = {value}
        if version is not None:
            allowed[version] = {value}

    step(1.0, "a")
    step(2.0)
    step(3.0, "b")
    step(4.0, "a")
    allowed["b"] = {3.0, None}
    store.drop("b")
    allowed["b"] = {None}
    step(5.0)
    step(6.0, "b")
    monkeypatch.undo()
    assert len(left) > 60
    for found, values in left:
        kept = names_of_versions(str(found))
        for version, each in values.items():
            is_there = version in kept or version is None and read_manifest(str(found)) is not None
            assert is_there or None in each, f"{found}: {version}"
            assert not is_there or any(is_whole(found, value, version) for value in each if value is not None), (
                f"{found}: {version}"
            )
        assert not is_there or VersionedStore(str(found)).contents is not None


class Walk:
    """Tensors in a store, and what each manifest must name: for each tensor, its value."""

    def __init__(self, folder, seed):
        self.folder, self.draw, self.store = folder, random.Random(seed), VersionedStore(folder)
        self.tensors = [moved_to_disk(self.store, torch.zeros(ENTRIES * size)) for size in (1, 1, 2, 3)]
        self.values, self.last, self.kept, self.value = [0.0] * len(self.tensors), None, {}, 0.0

    def go(self):
        self.value += 1.0
        self.number, self.name = self.draw.randrange(len(self.tensors)), self.draw.choice("abc")
        getattr(self, self.draw.choice(("step", "step", "step", "keep", "keep", "user", "replace", "drop", "end", "back")))()

    def commit(self):
        commit(self.store, *self.tensors)
        self.last = list(self.values)

    def step(self):
        for each in self.draw.sample(range(len(self.tensors)), self.draw.randint(0, len(self.tensors))):
            write(self.store, self.tensors[each], self.value, self.draw.choice((1, 4)))
            self.values[each] = self.value
        self.commit()

    def keep(self):
        write(self.store, self.tensors[self.number], self.value)
        await_writes(self.tensors[self.number])
        self.values[self.number] = self.value
        self.store.make_room_for_a_version()
        size = self.store.file.size
        self.commit()
        self.store.keep(self.name)
        self.kept[self.name] = self.last
        assert self.store.file.size == size

    def user(self):
        """Commits at once: the write may go into the last complete step."""
        self.tensors[self.number].fill_(self.value)
        self.values[self.number] = self.value
        self.store.carry_writes()
        self.commit()

    def replace(self):
        self.tensors[self.number] = moved_to_disk(self.store, torch.full_like(self.tensors[self.number], self.value))
        self.values[self.number] = self.value

    def drop(self):
        if self.name in self.kept:
            self.store.drop(self.name)
            del self.kept[self.name]

    def end(self):
        if self.last is not None:
            self.again(None, self.last)

    def back(self):
        if self.name in self.kept:
            self.again(self.name, self.kept[self.name])

    def again(self, version, values):
        self.tensors, self.store = [], None
        self.store = VersionedStore(self.folder, version=version)
        for place in self.store.manifest["places"]:
            self.tensors.append(self.store.again(StoredPlace(*place), torch.Size([place[1] // 4]), torch.float32))
        self.values = list(values)

    def check(self):
        assert [float(await_writes(t)[-1]) for t in self.tensors] == self.values
        assert self.last is None or values_of(self.folder) == [(each, each) for each in self.last]
        assert names_of_versions(self.folder) == sorted(self.kept)
        for version, values in self.kept.items():
            assert values_of(self.folder, version) == [(each, each) for each in values]
        check_places(self.store)


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_steps_and_versions_keeps_its_values(seed, folder):
    """Of tensors of several sizes: steps that write some of them, writes of the user, tensors that are replaced, versions, ends."""
    walk = Walk(folder, seed)
    for _ in range(60):
        walk.go()
        walk.check()


def check_places(store):
    """Each place belongs to one tensor, is free, or waits to be free, and no place of a version is free."""
    with store.guard:
        owned = [start for each in members(store._ranges) if each.is_alive for start in each.places]
        noted = [start for starts, _ in list(store._freed) for start in starts]
        free = [start for places in store._free.values() for start in places]
        assert sorted([*owned, *noted, *free, *store._loose]) == sorted(store._space)
        assert not {start for start in free if start in store._of_versions}
