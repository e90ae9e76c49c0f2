"""A run that ends at any time continues from its last complete step, without a checkpoint, with the same bits."""

from __future__ import annotations

import errno
import gc
import shutil

import pytest
import torch

import l2l_compile
from l2l_compile import DiskError, L2LError, OptionError
from slow_disk import Faults, slow_disk
from stored_training import OPTIMIZERS, same, training

QUICKER = 1e8  # bytes a second
STEPS = 6
MODES = ("in_backward", "in_forward")


def begun(folder, optimizer="adamw", update="in_backward", **options):
    """A training in a folder, behind its last complete step."""
    torch._dynamo.reset()
    gc.collect()  # a training that has failed leaves the folder with its traceback
    made = training(optimizer, disk=folder, update=update, resumable=True, **options)
    made.number = l2l_compile.resume(made.call).steps
    return made


def expected(optimizer="adamw", steps=STEPS, **options):
    made = training(optimizer, **options)
    made.step(steps)
    return made.tensors()


def cases():
    for optimizer in OPTIMIZERS:
        for update in MODES:
            for precision in ("fp32", "bf16", "fp16"):
                if precision != "fp16" or update != "in_backward":
                    is_quick = (optimizer, precision) in (
                        ("adamw", "bf16"),
                        ("sgd", "fp32"),
                        ("lamb", "fp16"),
                        ("adafactor", "bf16"),
                    )
                    yield pytest.param(optimizer, update, precision, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("optimizer", "update", "precision"), list(cases()))
def test_a_run_that_ends_continues_with_equal_bits(optimizer, update, precision, tmp_path):
    """It ends twice, between steps. The step that was done last is done again: nothing has committed it."""
    options = {"update": update, "precision": precision}
    wanted = expected(optimizer, **options)
    with slow_disk(Faults(rate=QUICKER)):
        for done, upto in ((0, 3), (2, 5), (4, STEPS)):
            made = begun(tmp_path, optimizer, **options)
            assert made.number == done
            made.step(upto - made.number)
            found = made.tensors()
            del made
    assert same(wanted, found)


POINTS = range(5, 85)  # half MiB


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("points", [pytest.param(POINTS, marks=pytest.mark.slow, id="all"), pytest.param(POINTS[::16], id="few")])
def test_a_write_that_fails_leaves_the_last_complete_step(update, points, tmp_path):
    """At each block of the first steps: what is in the files then is what a kill would leave."""
    wanted = expected(update=update)
    for behind in points:
        (folder := tmp_path / str(behind)).mkdir()
        with slow_disk(Faults(write_fails=(errno.EIO, behind << 19))):
            failing = begun(folder, update=update)
            with pytest.raises(DiskError, match="resumes from the last complete one"):
                failing.step(STEPS)
            reached = failing.number
        wait_for_writes(failing)
        shutil.copytree(folder, left := tmp_path / f"{behind}-left")
        made = begun(left, update=update)
        assert reached - 3 <= made.number < STEPS and same_behind(made, wanted), f"behind {behind / 2} MiB"


def wait_for_writes(made):
    with pytest.raises(DiskError):
        made.stored.store.settle()


def same_behind(made, wanted):
    made.step(STEPS - made.number)
    return same(wanted, made.tensors())
