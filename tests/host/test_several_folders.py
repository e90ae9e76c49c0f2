"""Parameters and optimizer state that are striped over folders on several disks: equal bits, and errors that name a folder."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil

import pytest
import torch

import l2l_compile
from l2l_compile import DiskError, OptionError, Options
from l2l_compile.disk.disk_store import range_of
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, same, training

QUICKER = 6e7  # bytes a second: slow enough to lag behind a small model
MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
WHOLE = LAYERS * 3 * (1 << 20)  # bytes of the matrices and their moments
pytestmark = pytest.mark.filterwarnings("ignore:.*are on one device")


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("a", "b")]
    for folder in made:
        folder.mkdir()
    return made


def trained(optimizer="adamw", steps=4, **options):
    made = training(optimizer, **options)
    made.step(steps)
    return made.tensors()


def cases():
    for optimizer in ("adamw", "sgd", "lamb"):
        for mode in MODES:
            for precision in ("fp32", "bf16"):
                is_quick = (optimizer, precision) == ("adamw", "bf16") or (optimizer, mode, precision) == (
                    "lamb",
                    "in_forward",
                    "fp32",
                )
                yield pytest.param(optimizer, mode, precision, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("optimizer", "mode", "precision"), list(cases()))
def test_bits_are_those_of_one_folder(optimizer, mode, precision, folders):
    """Also if one disk is much slower than the other, and if copies for the link are there as well."""
    options = {**MODES[mode], "precision": precision}
    expected = trained(optimizer, **options)
    with slow_disk(Faults(rate=QUICKER)):
        assert same(expected, trained(optimizer, disk=folders[0], **options))
        assert same(expected, trained(optimizer, disk=folders, **options))
    copies = precision == "bf16" and not options.get("delay")
    with slow_disk(Faults(), {folders[1]: Faults(rate=QUICKER / 2)}):
        assert same(expected, trained(optimizer, disk=tuple(folders), stored_copies=copies, **options))


def test_each_folder_has_its_share_of_the_bytes(folders):
    with slow_disk(Faults()) as faults:
        made = training("adamw", disk=folders, update="in_backward")
        made.step(3)
    moved = [file._moved for file in faults.files]
    of_step = l2l_compile.stats(made.call)
    assert of_step.disk_read_bytes == of_step.disk_written_bytes == WHOLE
    assert [file.folder for file in faults.files] == [str(folder) for folder in folders]
    assert all(0.4 < each[way] / sum(one[way] for one in moved) < 0.6 for each in moved for way in ("read", "write"))
    assert all(os.listdir(folder) == [] for folder in folders), "files without names"


def test_a_step_waits_half_as_long_for_two_disks(folders):
    """Of updates that wait for nothing but the disk."""

    def waited(disk):
        with slow_disk(Faults(rate=1e7)):
            made = training("adamw", disk=disk, update="in_backward")
            made.step(4)
            return l2l_compile.stats(made.call).disk_wait_seconds

    alone, together = waited(folders[0]), waited(folders)
    assert alone > 0.5 * WHOLE / 1e7 and together < 0.7 * alone


def test_explain_says_how_many_folders_there_are(folders):
    one, two = (training("adamw", disk=disk, update="in_backward") for disk in (folders[0], folders))
    told = [" ".join(str(l2l_compile.explain(made.call)(torch.ones(6, 5))).split()) for made in (one, two)]
    assert "in all 9.0 MiB, read and written once" in told[0] and "in all 9.0 MiB striped over 2 folders, read and" in told[1]
    assert f"{1200 * 10**12 // WHOLE:,} steps write what a disk is rated for that endures 1,200 TB" in told[0]
    assert f"{2400 * 10**12 // WHOLE:,} steps write what 2 disks are rated for that endure 1,200 TB each" in told[1]


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        ([], "must be a folder or a list of folders"),
        (["/a", 3], "must be a folder or a list of folders"),
        ({"/a"}, "must be a folder or a list of folders"),
        (["/a", "/b", "/a/../b/"], "has '/b' twice, the second time as '/a/../b/'"),
    ],
)
def test_folders_that_cannot_be_meant_are_refused(disk, said):
    with pytest.raises(OptionError, match=said):
        Options.build({"disk": disk})


def test_a_folder_that_does_not_exist_is_named(folders):
    with pytest.raises(OptionError, match=f"must be a folder that exists, got '{folders[1]}/none'"):
        training("adamw", disk=[folders[0], folders[1] / "none"], update="in_backward")


def test_the_folder_without_room_is_named_before_a_step(folders):
    with slow_disk(Faults(), {folders[1]: Faults(room=2 << 20)}):
        made = training("adamw", disk=folders, update="in_backward")
        before = [p.detach().clone() for p in made.model.parameters()]
        with pytest.raises(DiskError, match=f"^{folders[1]}: No space left on device while .* MiB were allocated there"):
            made.step()
    assert all(map(torch.equal, before, made.model.parameters())), "nothing was changed"


@pytest.mark.parametrize(("way", "number"), [("read_fails", errno.EIO), ("write_fails", errno.ENOSPC)])
def test_the_folder_that_fails_is_named(way, number, folders):
    with slow_disk(Faults(), {folders[1]: Faults(**{way: (number, 9 << 20)})}):
        failing = training("adamw", disk=folders, update="in_forward")
        with pytest.raises(DiskError, match=f"^{folders[1]}: {os.strerror(number)} while [0-9]+ bytes at byte"):
            failing.step(9)
        with pytest.raises(DiskError, match=f"^{folders[1]}: "):
            failing.step()


def begun(folders, **options):
    """A resumable training, behind its last complete step."""
    torch._dynamo.reset()
    gc.collect()
    made = training("adamw", disk=folders, resumable=True, **options)
    made.number = l2l_compile.resume(made.call).steps
    return made


@pytest.mark.parametrize("mode", ["in_backward", "in_forward"])
def test_a_run_that_ends_continues_from_all_folders(mode, folders):
    expected = trained(steps=6, **MODES[mode])
    with slow_disk(Faults(rate=QUICKER)):
        for done, upto in ((0, 3), (2, 6)):
            made = begun(folders, **MODES[mode])
            assert made.number == done
            made.step(upto - made.number)
            found = made.tensors()
            del made
    assert same(expected, found)
    assert all((folder / "l2l-store.bin").stat().st_size > WHOLE for folder in folders)


@pytest.mark.parametrize("behind", [5, 9, 14, 23])
def test_a_disk_that_fails_leaves_the_last_complete_step(behind, folders, tmp_path):
    """One of two: what is in the folders then is what a kill would leave."""
    expected = trained(steps=6, update="in_forward")
    with slow_disk(Faults(), {folders[1]: Faults(write_fails=(errno.EIO, behind << 20))}):
        failing = begun(folders, update="in_forward")
        with pytest.raises(DiskError, match=f"^{folders[1]}: .* resumes from the last complete one"):
            failing.step(9)
        reached = failing.number
    with contextlib.suppress(DiskError):
        failing.stored.store.settle()
    left = [shutil.copytree(folder, tmp_path / f"left-{folder.name}") for folder in folders]
    made = begun(left, update="in_forward")
    assert reached - 3 <= made.number < 6
    made.step(6 - made.number)
    assert same(expected, made.tensors())


def test_a_run_without_one_of_its_folders_names_it(folders):
    made = begun(folders, update="in_backward")
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    del made
    with pytest.raises(
        DiskError, match=f"^{folders[0]}: the run there is striped over 2 folders, .* and {folders[1]} is missing"
    ):
        begun(folders[0], update="in_backward")
    gc.collect()
    made = begun(folders, update="in_backward")
    assert made.number == 2 and all(range_of(p) is not None for p in made.model.parameters() if p.nbytes >= 1 << 20)
