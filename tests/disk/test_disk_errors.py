"""A disk that is missing, full, failing or limited: a sentence with path and bytes, and no signal."""

from __future__ import annotations

import errno
import mmap
import os
import time

import pytest
import torch

from l2l_compile import DiskError, OptionError, Options
from l2l_compile.disk.disk_file import DiskFile
from l2l_compile.disk.disk_store import DiskStore, range_of
from l2l_compile.disk.stored_entries import moved_to_disk
from slow_disk import Faults, slow_disk
from stored_training import training


def test_a_missing_folder_is_an_option_error(tmp_path):
    with pytest.raises(OptionError, match="'disk' must be a folder that exists, got '.*nowhere'"):
        training("adamw", disk=tmp_path / "nowhere", update="in_backward")


def test_disk_with_at_step_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(OptionError, match="needs update='in_backward' or 'in_forward'"):
        Options.build({"disk": tmp_path})


def test_host_memory_without_disk_is_refused(tmp_path):
    with pytest.raises(OptionError, match="give 'disk' a folder"):
        Options.build({"host_memory": "24GB"})


@pytest.mark.parametrize(("error", "said"), [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")])
def test_a_folder_that_cannot_be_written_is_named(error, said, tmp_path, monkeypatch):
    def refused(path, flags, *mode):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(DiskError, match=f"{tmp_path}: {said} while a file was opened there"):
        DiskFile(str(tmp_path))


def test_too_little_room_is_a_sentence_before_the_first_step(tmp_path):
    with slow_disk(Faults(room=4 << 20)):
        made = training("adamw", disk=tmp_path, update="in_backward")
        before = [p.detach().clone() for p in made.model.parameters()]
        with pytest.raises(DiskError, match=f"{tmp_path}: No space left on device while .* MiB were allocated"):
            made.step()
    assert all(map(torch.equal, before, made.model.parameters())), "nothing was changed"


POINTS = [1, 3, *range(9, 45, 2)]  # MiB behind which a transfer fails: while parameters are moved, and in the first steps


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("points", [pytest.param(POINTS, marks=pytest.mark.slow, id="all"), pytest.param(POINTS[::7], id="few")])
@pytest.mark.parametrize(("way", "update"), [("write_fails", "in_backward"), ("read_fails", "in_forward")])
def test_a_transfer_that_fails_ends_the_training(number, way, update, points, tmp_path):
    """At each point, the error is raised within a few steps, again in every later one, and nothing waits for ever."""
    made = f"{tmp_path}: {os.strerror(number)} while [0-9]+ bytes at byte [0-9]+ .* load the last checkpoint"
    for behind in points:
        with slow_disk(Faults(**{way: (number, behind << 20)})):
            failing = training("adamw", disk=tmp_path, update=update)
            start = time.monotonic()
            with pytest.raises(DiskError, match=made):
                failing.step(7)
            with pytest.raises(DiskError):
                failing.step()
            with pytest.raises(DiskError):
                failing.model.state_dict()
            assert time.monotonic() - start < 60


def test_the_page_cache_is_used_where_direct_is_refused(tmp_path):
    expected = training("adamw", update="in_backward")
    expected.step(2)
    with slow_disk(Faults(refuses_direct=True)) as faults:
        made = training("adamw", disk=tmp_path, update="in_backward")
        with pytest.warns(UserWarning, match="takes the page cache for option 'disk'.*refuses direct transfers"):
            made.step(2)
        assert all(map(torch.equal, expected.tensors(), made.tensors())) and not faults.files[0].direct


def test_a_folder_without_unnamed_files_gets_one_that_vanishes(tmp_path, monkeypatch):
    real = os.open

    def without(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", without)
    made = moved_to_disk(DiskStore(str(tmp_path)), torch.arange(3 << 20, dtype=torch.float32))
    assert os.listdir(tmp_path) == [] and torch.equal(made, torch.arange(3 << 20, dtype=torch.float32))


def test_transfers_that_are_cut_short_go_on(tmp_path):
    with slow_disk(Faults(short=True)):
        given = torch.randn(5000)
        made = moved_to_disk(DiskStore(str(tmp_path)), given)
        assert torch.equal(made, given)


def test_less_than_a_page_of_a_transfer_is_an_error(tmp_path):
    with (
        slow_disk(Faults(cut=True)),
        pytest.raises(DiskError, match=f"{mmap.PAGESIZE // 2} of 20480 bytes at byte .* were written"),
    ):
        moved_to_disk(DiskStore(str(tmp_path)), torch.randn(5000))


def test_the_range_of_a_tensor_that_is_gone_is_used_again(tmp_path):
    store = DiskStore(str(tmp_path))
    first = moved_to_disk(store, torch.zeros(2000))
    start = range_of(first).start
    del first
    second, third = (moved_to_disk(store, torch.ones(2000)) for _ in range(2))
    assert range_of(second).start == start != range_of(third).start
