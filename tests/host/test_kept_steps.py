"""A step that is committed under a name is a checkpoint: a run continues from it with equal bits, whatever was done behind it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_killed_and_resumed import Plain, digest

import l2l_compile
from l2l_compile import DiskError, L2LError
from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.manifest import names_of_versions, read_manifest
from l2l_compile.disk.run_files import DATA, HEADER
from slow_disk import Faults, slow_disk
from stored_training import same, training

TESTS = Path(__file__).parent.parent
MODES = ("in_backward", "in_forward")


def begun(folder, version=None, update="in_forward", **options):
    """A training in a folder, behind its last complete step or a version."""
    torch._dynamo.reset()
    gc.collect()  # a training that is gone leaves the folder
    made = training("adamw", disk=folder, update=update, resumable=True, **options)
    resumed = l2l_compile.resume(made.call, version)
    made.number, made.stored_extra = resumed.steps, resumed.extra
    return made


def tensors_in(folder, version=None):
    """The tensors of a step, as `Training.tensors` has them, read from the files beside all stores."""
    contents, data = read_manifest(str(folder), version)["contents"], Path(folder, DATA)

    def value(entry):
        if entry[0] == "is":
            return entry[1]
        _, (start, size, _), shape, dtype = entry
        with data.open("rb") as file:
            file.seek(HEADER + start)
            read = torch.frombuffer(bytearray(file.read(size)), dtype=dtype)
        return read[: torch.Size(shape).numel()].view(shape)

    parameters = contents["parameters"]
    states = (value(each) for entry in parameters for each in entry["state"].values())
    return [*(value(entry["value"]) for entry in parameters), *(s for s in states if isinstance(s, torch.Tensor))]


def behind_each_step(steps, **options):
    made, found = training("adamw", **options), []
    for _ in range(steps):
        made.step()
        found.append(made.tensors())
    return found


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_step_that_is_kept_continues_with_equal_bits(update, precision, tmp_path):
    """All steps, the first one too. Each commit with a name writes its bytes once, and the small tensors a second time."""
    options = {"update": update, "precision": precision}
    wanted = behind_each_step(5, **options)
    made = begun(tmp_path, **options)
    for _ in range(4):
        made.step()
        l2l_compile.commit(made.call, {"at": made.number}, keep=f"step-{made.number}")
        on_disk = made.stored.plan.placement.on_disk
        assert l2l_compile.stats(made.call).disk_written_bytes < 1.02 * on_disk
    kept = l2l_compile.versions(tmp_path)
    assert [(name, each.steps, each.extra) for name, each in kept.items()] == [(f"step-{n}", n, {"at": n}) for n in range(1, 5)]
    for number in range(1, 5):
        assert same(wanted[number - 1], tensors_in(tmp_path, f"step-{number}"))
    del made
    made = begun(tmp_path, "step-2", **options)
    assert made.number == 2 and made.stored_extra == {"at": 2}
    made.step(3)
    assert same(wanted[4], made.tensors())
    assert all(same(wanted[n - 1], tensors_in(tmp_path, f"step-{n}")) for n in range(1, 5)), "later steps have left them"


def test_a_run_that_goes_back_takes_the_place_of_newer_steps(tmp_path):
    """When its first step is committed, and not before. Versions with newer steps stay."""
    made = begun(tmp_path)
    made.step(1)
    l2l_compile.commit(made.call, keep="one")
    made.step(2)
    l2l_compile.commit(made.call, keep="three")
    made.step(1)
    l2l_compile.commit(made.call, wait=True)
    del made
    made = begun(tmp_path, "one")
    assert made.number == 1
    del made
    made = begun(tmp_path)
    assert made.number == 4, "no step was committed"
    del made
    made = begun(tmp_path, "one")
    made.step(1)
    l2l_compile.commit(made.call, wait=True)
    size = made.stored.store.file.size
    del made
    made = begun(tmp_path)
    assert made.number == 2 and {n: v.steps for n, v in l2l_compile.versions(tmp_path).items()} == {"one": 1, "three": 3}
    made.step(2)
    l2l_compile.synchronize(made.call)
    assert made.stored.store.file.size == size


def test_a_name_is_used_again_and_dropped(tmp_path):
    wanted = behind_each_step(6, update="in_forward")
    made, sizes = begun(tmp_path), []
    for _ in range(4):
        made.step()
        l2l_compile.commit(made.call, keep="best")
        sizes.append(made.stored.store.file.size)
    assert sizes[1] == sizes[3] and same(wanted[3], tensors_in(tmp_path, "best"))
    l2l_compile.drop_version(made.call, "best")
    assert l2l_compile.versions(tmp_path) == {}
    made.step()
    l2l_compile.commit(made.call, keep="other")
    made.step()
    l2l_compile.commit(made.call, wait=True)
    assert made.stored.store.file.size == sizes[3]
    assert same(wanted[4], tensors_in(tmp_path, "other")) and same(wanted[5], tensors_in(tmp_path))


def test_a_version_without_room_leaves_the_run_whole(tmp_path):
    """Of the first step too: its optimizer state is made behind `optimizer.step()`. The step can be committed without a name."""
    wanted = behind_each_step(4, update="in_forward")
    with slow_disk(Faults(room=23 << 20)):  # two places of 9 MiB
        made = begun(tmp_path)
        for number in range(1, 4):
            made.step()
            with pytest.raises(DiskError, match=rf"{tmp_path}: No space left .* 8\.. MiB were allocated .*, or drop a version"):
                l2l_compile.commit(made.call, keep="a")
            assert l2l_compile.versions(tmp_path) == {}
            l2l_compile.commit(made.call, {"at": number}, wait=True)
            assert same(wanted[number - 1], tensors_in(tmp_path))
        made.step()
        assert same(wanted[3], made.tensors())


@pytest.mark.parametrize("update", MODES)
def test_weights_that_are_written_behind_a_version_leave_it(update, tmp_path):
    """With and without a record of PyTorch, before an evaluation and before a step: as a moving average that is put in and out."""

    def loop(made):
        for _ in range(2):
            made.step()
        l2l_compile.synchronize(made.call)
        if made.stored.run is not None:
            l2l_compile.commit(made.call, keep="a")
        wide = next(p for p in made.model.parameters() if p.nbytes >= 1 << 20)
        own = wide.detach().clone()
        with torch.no_grad():
            wide.mul_(0.5)
            seen = made.call(torch.ones(6, 5)).clone()
            wide.copy_(own)
            wide.data.view(-1)[:2000] *= 3.0
            state = made.optimizer.state[wide]["exp_avg"]
            state.view(-1)[-1] = 1.0
        made.step(2)
        return made, seen

    plain, seen = loop(training("adamw", update=update, disk=tmp_path))
    wanted = plain.tensors()
    (folder := tmp_path / "run").mkdir()
    made, found = loop(begun(folder, update=update))
    assert torch.equal(seen, found) and same(wanted, made.tensors())
    assert same(behind_each_step(2, update=update)[1], tensors_in(folder, "a"))


@pytest.mark.parametrize("update", MODES)
def test_state_that_is_written_within_the_next_step_is_updated(update, tmp_path):
    """Behind its forward, and before its backward."""

    def loop(made):
        made.step(2)
        l2l_compile.synchronize(made.call)
        if made.stored.run is not None:
            l2l_compile.commit(made.call, keep="a")
        loss = made.call(torch.ones(6, 5)).pow(2).mean()
        for state in made.optimizer.state.values():
            state["exp_avg"].mul_(3.0)
        loss.backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        made.step()
        return made

    wanted = loop(training("adamw", update=update, disk=tmp_path)).tensors()
    (folder := tmp_path / "run").mkdir()
    assert same(wanted, loop(begun(folder, update=update)).tensors())
    assert same(behind_each_step(2, update=update)[1], tensors_in(folder, "a"))


def test_a_frozen_weight_that_is_written_is_committed(tmp_path):
    """No update writes it, so its place is that of the version until then."""
    made = begun(tmp_path)
    made.step(2)
    l2l_compile.commit(made.call, keep="a")
    kept = made.tensors()
    weight = made.model[1][0].weight.requires_grad_(False)
    torch._dynamo.reset()
    made.step()
    l2l_compile.synchronize(made.call)
    with torch.no_grad():
        weight.mul_(2.0)
    l2l_compile.commit(made.call, wait=True)
    assert same(made.tensors(), tensors_in(tmp_path)) and same(kept, tensors_in(tmp_path, "a"))


def test_an_ordinary_checkpoint_is_saved_from_a_version(tmp_path):
    """`torch.save` of what `resume` gives, and then of the last step. A run without disk continues from it."""
    options = {"update": "in_forward", "precision": "bf16"}
    wanted = behind_each_step(4, **options)
    made = begun(tmp_path, **options)
    made.step(2)
    l2l_compile.commit(made.call, keep="two")
    made.step()
    l2l_compile.commit(made.call, wait=True)
    del made
    for version, steps in ("two", 2), (None, 3):
        made = begun(tmp_path, version, **options)
        torch.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}, tmp_path / "saved.pt")
        del made
        saved = torch.load(tmp_path / "saved.pt")
        plain = training("adamw", **options)
        plain.model.load_state_dict(saved["model"])
        plain.optimizer.load_state_dict(saved["optimizer"])
        plain.number = steps
        plain.step(4 - steps)
        assert same(wanted[3], plain.tensors())


def test_a_version_of_another_model_is_refused_with_its_name(tmp_path):
    made = begun(tmp_path)
    made.step()
    l2l_compile.commit(made.call, keep="a")
    made.step()
    l2l_compile.commit(made.call, wait=True)
    left = shutil.copytree(tmp_path, f"{tmp_path}-left")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7))
    made = training("adamw", model=model, disk=left, update="in_forward", resumable=True)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(L2LError, match=f"version 'a' in {left} holds a run whose parameter 0 is .* here it is"):
        l2l_compile.resume(made.call, "a")
    assert same(before, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("name", ["", ".a", "a/b", "..", "a b", "a.new", "x" * 101, 3])
def test_a_name_that_no_file_may_have_is_refused(name, tmp_path):
    made = begun(tmp_path)
    made.step()
    with pytest.raises(L2LError, match="is no name of a version: it is a part of a file's name"):
        l2l_compile.commit(made.call, keep=name)
    l2l_compile.commit(made.call, keep="a")


def test_a_version_is_dropped_of_a_run_that_is_resumed(tmp_path):
    made = training("adamw", disk=tmp_path, update="in_forward", resumable=True)
    with pytest.raises(L2LError, match=r"l2l_compile.resume\(model\) has begun or continued: call it before"):
        l2l_compile.drop_version(made.call, "a")
    made = begun(tmp_path)
    made.step()
    with pytest.raises(DiskError, match=f"{tmp_path} has no version 'a', but no version: name one of them"):
        l2l_compile.drop_version(made.call, "a")


RUN = """
import sys
import l2l_compile
from slow_disk import Faults, slow_disk
from stored_training import training

folder, update, delay, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with slow_disk(Faults(rate=8e7)):
    made = training("adamw", disk=folder, update=update, precision="bf16", resumable=True, **({"delay": 1} if delay else {}))
    made.number = l2l_compile.resume(made.call).steps
    print("ready", flush=True)
    while made.number < steps:
        made.step()
        if made.number % 2:
            l2l_compile.commit(made.call, keep=f"step-{made.number}")
            for name in list(l2l_compile.versions(folder))[:-2]:
                l2l_compile.drop_version(made.call, name)
        l2l_compile.commit(made.call, keep="latest") if made.number % 4 == 0 else None
        print("step", flush=True)
"""


@pytest.mark.parametrize(
    ("kills", "update"),
    [(2, "in_forward"), *(pytest.param(25, update, marks=pytest.mark.slow) for update in MODES)],
)
def test_each_kill_leaves_the_versions_that_were_kept(kills, update, tmp_path):
    """In the middle of keeping and of dropping too: what is there has the bits of its step."""
    plain, times = Plain("adamw", update, "bf16"), random.Random(1)
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS}/host", "OMP_NUM_THREADS": "1"}
    for _ in range(kills):
        command = [sys.executable, "-c", RUN, str(tmp_path), update, "0", str(10**6)]
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert run.stdout.readline() == "ready\n"
        for _ in range(4):
            assert run.stdout.readline() == "step\n"
        time.sleep(times.uniform(0.0, 0.8))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        kept = names_of_versions(str(tmp_path))
        assert 2 <= len(kept) <= 4
        for version in (None, *kept):
            steps = read_manifest(str(tmp_path), version)["contents"]["steps"]
            assert version in (None, "latest", f"step-{steps}")
            assert digest(tensors_in(tmp_path, version)) == plain.behind(steps), f"{version}, behind {steps} steps"


def test_weights_on_disk_are_those_of_the_version(tmp_path):
    """Nothing is copied into memory by `resume`, and each tensor keeps a place of its own for the next steps."""
    made = begun(tmp_path)
    made.step()
    l2l_compile.commit(made.call, keep="a")
    del made
    made = begun(tmp_path, "a")
    ranges = [range_of(p) for p in made.model.parameters() if p.nbytes >= 1 << 20]
    assert ranges and all(each.is_private and len(each.places) == 3 for each in ranges)
    made.step(2)
    l2l_compile.synchronize(made.call)
    assert not any(each.is_private for each in ranges)
