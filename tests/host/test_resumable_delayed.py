"""`delay=1` continues behind a kill: a commit keeps the weights that the next step reads beside the newest ones."""

from __future__ import annotations

import gc
import shutil
import time

import pytest
import torch

import l2l_compile
from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.manifest import read_manifest
from l2l_compile.disk.versioned_range import VersionedRange
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, WIDTH, same, training

DELAYED = {"update": "in_forward", "delay": 1}


def begun(folder, version=None, optimizer="adamw", **options):
    torch._dynamo.reset()
    gc.collect()
    made = training(optimizer, disk=folder, resumable=True, **{**DELAYED, **options})
    made.number = l2l_compile.resume(made.call, version).steps
    return made


def expected(steps, optimizer="adamw", **options):
    made = training(optimizer, **DELAYED, **options)
    made.step(steps)
    return made.tensors()


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("adamw", "bf16"),
        ("adamw", "fp16"),
        ("sgd", "fp32"),
        pytest.param("lamb", "bf16", marks=pytest.mark.slow),
        pytest.param("adafactor", "fp32", marks=pytest.mark.slow),
        pytest.param("lion", "fp16", marks=pytest.mark.slow),
    ],
)
def test_a_delayed_run_that_ends_continues_with_equal_bits(optimizer, precision, tmp_path):
    """Three times, behind the first step too. On a slow disk."""
    wanted = expected(7, optimizer, precision=precision)
    folder = tmp_path / "0"
    folder.mkdir()
    for before, upto in (0, 1), (1, 3), (3, 4), (4, 7):
        with slow_disk(Faults(rate=1e8)):
            made = begun(folder, optimizer=optimizer, precision=precision)
            assert made.number == before
            made.step(upto - before)
            l2l_compile.commit(made.call, wait=True)
            found = made.tensors()
        folder = shutil.copytree(folder, tmp_path / str(upto))
    assert same(wanted, found)


def test_a_delayed_step_writes_its_bytes_once(tmp_path):
    """Weights have a third place, and nothing is written for them: they are where the step before has written them."""
    made = begun(tmp_path, precision="bf16")
    made.step(4)
    of_step, plan = l2l_compile.stats(made.call), made.stored.plan
    l2l_compile.commit(made.call, wait=True)
    manifest = (tmp_path / "l2l-store.manifest").stat().st_size
    assert plan.masters == LAYERS * 4 * WIDTH**2 and plan.states == 2 * plan.masters
    most = plan.masters + plan.states + 2 * manifest  # that of the step before may have come behind the beginning of this one
    assert of_step.disk_written_bytes <= most < 1.03 * plan.placement.on_disk
    size = (tmp_path / "l2l-store.bin").stat().st_size
    assert 3 * plan.masters + 2 * plan.states <= size < 3 * plan.masters + 2 * plan.states + (2 << 20)
    made.step(4)
    l2l_compile.synchronize(made.call)
    assert (tmp_path / "l2l-store.bin").stat().st_size == size


@pytest.mark.parametrize(
    ("delay", "places"),
    [(1, "3 places of each parameter and 2 of its state"), (0, "2 places of each parameter and of its state")],
)
def test_a_report_counts_the_places_of_a_resumable_run(delay, places, tmp_path):
    made = training("adamw")
    options = {
        "optimizer": made.optimizer,
        "update": "in_forward",
        "delay": delay,
        "disk": tmp_path,
        "resumable": True,
        "host_memory": "1GB",
    }
    report = " ".join(str(l2l_compile.explain(made.model, options)(torch.ones(6, 5))).split())
    matrix = 4 * WIDTH**2 / 2**20
    size = LAYERS * matrix * (3 + 4 if delay else 2 + 4)
    assert f"{places} (resumable) take {size:.1f} MiB" in report


def test_a_kept_step_of_a_delayed_run_continues_with_equal_bits(tmp_path):
    wanted = expected(6, precision="bf16")
    made = begun(tmp_path, precision="bf16")
    made.step(2)
    l2l_compile.commit(made.call, keep="two")
    made.step(3)
    l2l_compile.commit(made.call, keep="five")
    made.step(1)
    assert same(wanted, made.tensors())
    for version, steps in ("two", 2), ("five", 5):
        del made
        made = begun(tmp_path, version, precision="bf16")
        assert made.number == steps
        made.step(6 - steps)
        assert same(wanted, made.tensors())


@pytest.mark.parametrize("is_kept", [False, True])
def test_weights_that_the_loop_writes_are_read_by_the_next_step(is_kept, tmp_path):
    """On disk and in memory, between two steps: no weights of the step before are left of these."""

    def loop(made, steps):
        for _ in range(steps):
            made.step()
            l2l_compile.synchronize(made.call)
            parameters = list(made.model.parameters())
            with torch.no_grad():
                for p in parameters[made.number % 2 :: 2]:
                    p.mul_(0.9)
            if made.stored.run is not None:
                l2l_compile.commit(made.call, wait=True, **({"keep": "a"} if is_kept else {}))

    plain = training("adamw", disk=tmp_path, **DELAYED)
    loop(plain, 6)
    wanted = plain.tensors()
    (folder := tmp_path / "0").mkdir()
    for before, upto in (0, 2), (2, 3), (3, 6):
        made = begun(folder)
        assert made.number == before
        loop(made, upto - before)
        found = made.tensors()
        folder = shutil.copytree(folder, tmp_path / str(upto))
    assert same(wanted, found)


def test_a_commit_that_is_late_keeps_the_weights_of_its_step(tmp_path, monkeypatch):
    """The next step is over before the places of the commit are known."""
    wanted, check_whole = expected(6, precision="bf16"), VersionedRange.check_whole

    def late(self):
        time.sleep(0.05)
        check_whole(self)

    monkeypatch.setattr(VersionedRange, "check_whole", late)
    made = begun(tmp_path, precision="bf16")
    made.step(4)
    made.stored.store.await_commit()
    made = begun(shutil.copytree(tmp_path, f"{tmp_path}-left"), precision="bf16")
    assert made.number == 3
    made.step(3)
    assert same(wanted, made.tensors())


def test_a_frozen_layer_has_no_weights_of_a_step_before(tmp_path):
    made = begun(tmp_path)
    made.step(3)
    frozen = made.model[1][0].weight.requires_grad_(False)
    torch._dynamo.reset()
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    entries = read_manifest(str(tmp_path))["contents"]["parameters"]
    before = [entry["value"][1][2] for entry in entries if entry["value"][0] == "at"]
    assert before.count(None) == 1 and range_of(frozen).before == range_of(frozen).newest and len(before) == LAYERS


def test_a_run_continues_with_a_delay_and_without(tmp_path):
    """Each way the first step reads the newest weights, as the first step of a training does."""
    plain = None
    for delay, steps in (0, 2), (1, 4), (0, 7), (1, 9):
        before, plain = plain, training("adamw", update="in_forward", delay=delay)
        if before is not None:
            plain.model.load_state_dict(before.model.state_dict())
            state = before.optimizer.state_dict()
            for each in state["state"].values():
                each.pop("l2l_weight_of_a_step_before_float32", None)
            plain.optimizer.load_state_dict(state)
            plain.number = before.number
        plain.step(steps - plain.number)
        made = begun(tmp_path, delay=delay)
        assert made.number == (before.number if before is not None else 0)
        made.step(steps - made.number)
        l2l_compile.commit(made.call, wait=True)
        assert same(plain.tensors(), made.tensors())
        del made
