"""A resumable run over several folders: each has its part, and no part is taken for another, or lost."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from l2l_compile import DiskError
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import StoredSpan, await_writes, range_of
from l2l_compile.disk.run_files import DATA
from l2l_compile.disk.stored_entries import moved_to_disk
from l2l_compile.disk.versioned_range import StoredPlace
from l2l_compile.disk.versions import VersionedStore
from l2l_compile.memory.pages import pages

ENTRIES = 1 << 20  # 4 MiB: each of three folders has a stripe of it
NAMES = ["l2l-store.bin", "l2l-store.lock"]
pytestmark = pytest.mark.filterwarnings("ignore:.*are on one device")


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("a", "b", "c")]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def filled(store, value):
    return moved_to_disk(store, torch.full((ENTRIES,), value))


def write(store, tensor, value):
    buffer = pages(tensor.nbytes, "a test")
    buffer.view(torch.float32).fill_(value)
    store.write([StoredSpan(range_of(tensor), 0, tensor.nbytes, 0)], buffer).wait()


def commit(store, *tensors):
    store.begin_commit([range_of(t) for t in tensors], lambda places: [(p.start, p.size) for p in places])
    store.await_commit()


def run_in(folders, *values):
    """Begin a run, and commit a tensor of each value, one behind the other."""
    store = VersionedStore(*folders)
    tensor = filled(store, 0.0)
    for value in values:
        write(store, tensor, value)
        commit(store, tensor)


def found_in(folders):
    """The values that a run has in these folders."""
    store = VersionedStore(*folders)
    held = [store.again(StoredPlace(*place), torch.Size([ENTRIES]), torch.float32) for place in store.contents]
    assert all(bool((each == each[0]).all()) for each in held)
    return [float(each[0]) for each in held]


def test_each_folder_has_a_part_and_the_first_the_manifest(folders):
    run_in(folders, 1.0, 2.0)
    assert sorted(os.listdir(folders[0])) == [*NAMES, "l2l-store.manifest"]
    assert all(sorted(os.listdir(folder)) == NAMES for folder in folders[1:])
    assert found_in(folders) == [2.0]


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_writes_behind_a_commit_leave_its_stripes(commits, folders):
    """Also those of a step that has written a part of them, in some folders. What the process sees is the newest."""
    store = VersionedStore(*folders)
    tensor = filled(store, 0.0)
    address = tensor.data_ptr()
    for value in range(1, commits + 1):
        write(store, tensor, float(value))
        commit(store, tensor)
    write(store, tensor, 9.0)
    assert bool((await_writes(tensor) == 9.0).all()) and tensor.data_ptr() == address
    commit(store, tensor)
    buffer = pages(2 << 20, "a test")
    store.write([StoredSpan(range_of(tensor), 1 << 20, 2 << 20, 0)], buffer).wait()
    whole = pages(tensor.nbytes, "a test")
    store.read([StoredSpan(range_of(tensor), 0, tensor.nbytes, 0)], whole).wait()
    assert whole.view(torch.float32).view(4, -1).unique(dim=1).view(-1).tolist() == [9.0, 0.0, 0.0, 9.0]
    del store, tensor
    assert found_in(folders) == [9.0]


def test_a_run_goes_on_where_its_disks_are_mounted_elsewhere(folders, tmp_path):
    run_in(folders, 1.0)
    moved = [shutil.move(folder, tmp_path / f"mounted-{number}") for number, folder in enumerate(folders)]
    assert found_in([str(folder) for folder in moved]) == [1.0]


def test_a_run_that_grows_finds_all_it_allocated(folders):
    run_in(folders, 1.0)
    store = VersionedStore(*folders)
    first = store.again(StoredPlace(*store.contents[0]), torch.Size([ENTRIES]), torch.float32)
    others = [filled(store, float(value)) for value in (5, 6, 7)]
    commit(store, first, *others)
    del store, first, others
    assert found_in(folders) == [1.0, 5.0, 6.0, 7.0]


def test_a_folder_that_is_left_out_is_named(folders):
    run_in(folders, 1.0)
    a, b, c = folders
    with pytest.raises(DiskError, match=f"^{a}: the run there is striped over 3 folders, {a}, {b}, {c}, and {b} is missing"):
        VersionedStore(a, c)
    with pytest.raises(DiskError, match=f"^{b}: l2l-store.bin is part 2 of a run whose manifest was {a}/l2l-store.manifest"):
        VersionedStore(b, c)
    with pytest.raises(DiskError, match=f"^{c}: .* is part 3 of a run .*: give 'disk' the folders of this run, in their order"):
        VersionedStore(c)
    assert found_in(folders) == [1.0]


def test_a_folder_too_many_is_refused(folders):
    run_in(folders[:2], 1.0)
    with pytest.raises(DiskError, match=f"^{folders[0]}: the run there is striped over 2 folders, .*, and 'disk' has 3: give"):
        VersionedStore(*folders)
    assert found_in(folders[:2]) == [1.0]


def test_folders_in_another_order_are_refused(folders):
    run_in(folders, 1.0)
    a, b, c = folders
    with pytest.raises(DiskError, match=f"^{c}: l2l-store.bin is part 3 of this run in place of part 2.*in their order"):
        VersionedStore(a, c, b)
    with pytest.raises(DiskError, match=f"^{b}: l2l-store.bin is part 2 of a run whose manifest was"):
        VersionedStore(b, a, c)
    assert found_in(folders) == [1.0]


def test_a_first_disk_that_is_not_mounted_loses_nothing(folders, tmp_path):
    """Its mount point is an empty folder then."""
    run_in(folders, 1.0)
    away = shutil.move(folders[0], tmp_path / "away")
    os.mkdir(folders[0])
    with pytest.raises(
        DiskError, match=f"^{folders[1]}: .* was {folders[0]}/l2l-store.manifest, and {folders[0]} has not the first part"
    ):
        VersionedStore(*folders)
    shutil.rmtree(folders[0])
    shutil.move(away, folders[0])
    assert found_in(folders) == [1.0]


def test_another_disk_that_is_not_mounted_is_named(folders, tmp_path):
    run_in(folders, 1.0)
    shutil.move(folders[2], tmp_path / "away")
    os.mkdir(folders[2])
    with pytest.raises(
        DiskError, match=f"^{folders[2]}: l2l-store.bin is missing, so {folders[0]}/l2l-store.manifest is not of it"
    ):
        VersionedStore(*folders)
    assert os.listdir(folders[2]) == ["l2l-store.lock"], "nothing was made"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.truncate(os.fstat(file.fileno()).st_size - PAGE), "has .* in place of"),
        (lambda file: file.write(bytes(20 * PAGE)), "is of another run"),
    ],
)
def test_a_part_that_is_damaged_is_named(change, said, folders):
    run_in(folders, 1.0)
    with open(os.path.join(folders[1], DATA), "r+b") as file:
        change(file)
    with pytest.raises(DiskError, match=f"^{folders[1]}: l2l-store.bin {said}"):
        VersionedStore(*folders)


def test_the_first_folder_of_another_run_is_no_second_one(folders):
    run_in(folders[1:2], 1.0)
    with pytest.raises(DiskError, match=f"^{folders[1]}: another run has its first folder there"):
        VersionedStore(*folders)
    assert found_in(folders[1:2]) == [1.0]


def test_parts_without_a_commit_are_begun_anew(folders):
    """A kill may come before the files have a header."""
    run_in(folders)
    assert VersionedStore(*folders).contents is None
    with open(os.path.join(folders[2], DATA), "wb"):
        pass
    assert VersionedStore(*folders).contents is None


def test_runs_that_share_a_folder_keep_each_other_out(folders):
    a, b, c = folders
    store = VersionedStore(a, b)
    with pytest.raises(DiskError, match=f"^{b}: a model of this process trains in this folder"):
        VersionedStore(c, b)
    del store
    assert VersionedStore(a, b).contents is None


def test_a_version_is_kept_over_several_folders(folders):
    """Its places are striped as those of the last step, which later steps write beside them."""
    store = VersionedStore(*folders)
    tensor = filled(store, 1.0)
    commit(store, tensor)
    store.await_commit()
    store.make_room_for_a_version()
    store.keep("one")
    for value in (2.0, 3.0, 4.0):
        write(store, tensor, value)
        commit(store, tensor)
    store.await_commit()
    assert bool((await_writes(tensor) == 4.0).all())
    del store, tensor
    found = []
    for version in ("one", None):
        store = VersionedStore(*folders, version=version)
        held = store.again(StoredPlace(*store.contents[0]), torch.Size([ENTRIES]), torch.float32)
        found.append(held.unique().tolist())
        del store, held
    assert found == [[1.0], [4.0]]
