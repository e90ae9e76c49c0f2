"""A run that ends at any time continues from its last complete step, without a checkpoint, with the same bits."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import DiskError
from l2l_compile.disk.disk_store import DiskStore, range_of
from l2l_compile.disk.manifest import read_manifest
from l2l_compile.disk.stored_entries import moved_to_disk
from models import compiled
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, OPTIMIZERS, WIDTH, Training, matrices, same, training, training_of

QUICKER = 1e8  # bytes a second
STEPS = 6
MODES = ("in_backward", "in_forward")


def left_of(made, folder):
    """What another process finds in the folder of a training, now: a copy of the folder."""
    with contextlib.suppress(DiskError):
        made.stored.store.settle()
    return shutil.copytree(folder, f"{folder}-{made.number}")


def begun(folder, optimizer="adamw", update="in_backward", **options):
    """A training in a folder, behind its last complete step."""
    torch._dynamo.reset()
    gc.collect()  # a training that has failed leaves the folder with its traceback
    made = training(optimizer, disk=folder, update=update, resumable=True, **options)
    resumed = l2l_compile.resume(made.call)
    made.number, made.stored_extra = resumed.steps, resumed.extra
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
        made = begun(left_of(failing, folder), update=update)
        assert reached - 3 <= made.number < STEPS and same_behind(made, wanted), f"behind {behind / 2} MiB"


def same_behind(made, wanted):
    made.step(STEPS - made.number)
    return same(wanted, made.tensors())


@pytest.mark.parametrize("update", MODES)
def test_a_step_writes_its_bytes_once(update, tmp_path):
    """As many as without the option, and the manifest: small tensors. The file has two places for each tensor."""
    made = begun(tmp_path, update=update)
    made.step(4)
    of_step, on_disk = l2l_compile.stats(made.call), made.stored.plan.placement.on_disk
    l2l_compile.commit(made.call, wait=True)
    manifest = (tmp_path / "l2l-store.manifest").stat().st_size
    assert on_disk == LAYERS * 3 * 4 * WIDTH**2 and of_step.disk_written_bytes <= on_disk + manifest < 1.01 * on_disk
    small = sum(t.nbytes for t in made.tensors() if t.nbytes < 1 << 20)
    assert small < manifest < small + 30_000
    assert 2 * on_disk < (tmp_path / "l2l-store.bin").stat().st_size < 2 * on_disk + (1 << 20)


def test_all_large_tensors_are_on_disk_with_room_in_memory(tmp_path):
    """Those that are small are in the manifest, and nothing else is written."""
    made = begun(tmp_path, spare=1 << 30)
    made.step(2)
    assert all((t.nbytes >= 1 << 20) == (range_of(t) is not None) for t in held_by(made))
    made = begun(left_of(made, tmp_path), spare=1 << 30)
    assert all((t.nbytes >= 1 << 20) == (range_of(t) is not None) for t in held_by(made)), "before the first forward"


def held_by(made):
    states = [made.optimizer.state[p] for p in made.model.parameters()]
    return [*made.model.parameters(), *(v for state in states for v in state.values())]


@pytest.mark.parametrize("update", MODES)
def test_what_the_loop_changes_between_steps_belongs_to_the_step(update, tmp_path):
    """Learning rates, and weights on disk and in memory; and the state that the loop hands in, with its numbers and tensors."""

    def loop(made, scheduler, steps):
        for _ in range(steps):
            made.step()
            scheduler.step()
            l2l_compile.synchronize(made.call)
            with torch.no_grad():
                for p in made.model.parameters():
                    p.mul_(0.99)
            if made.stored.run is not None:
                l2l_compile.commit(
                    made.call, {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "at": (1, None)}
                )

    def of(made):
        return made, torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.7)

    plain = training(disk=tmp_path, update=update)
    loop(*of(plain), STEPS)
    wanted = plain.tensors()
    made, scheduler = of(begun(tmp_path, update=update))
    loop(made, scheduler, 3)
    made.backward()  # of a step that is never complete
    l2l_compile.synchronize(made.call)
    made.stored.store.await_commit()
    made, scheduler = of(again := begun(left_of(made, tmp_path), update=update))
    extra = again.stored_extra
    assert again.number == 3 and extra["at"] == (1, None) and torch.equal(extra["rng"], torch.get_rng_state())
    scheduler.load_state_dict(extra["scheduler"])
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.7**3, rel=1e-12)
    loop(again, scheduler, STEPS - 3)
    assert same(wanted, again.tensors())


def test_buffers_continue_as_they_were(tmp_path):
    """Running statistics. A large one that nothing has written stays as the user builds it, and is not in the manifest."""

    def built(folder=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        model.register_buffer("mask", torch.ones(1 << 20))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        options = {} if folder is None else {"disk": folder, "resumable": True}
        return model, optimizer, compiled(model, optimizer=optimizer, update="in_forward", **options)

    def step(optimizer, call, number):
        call(torch.randn(6, 5, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, call = built()
    for number in range(5):
        step(optimizer, call, number)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    model, optimizer, call = built(tmp_path)
    l2l_compile.resume(call)
    for number in range(3):
        step(optimizer, call, number)
    l2l_compile.commit(call, wait=True)
    assert (tmp_path / "l2l-store.manifest").stat().st_size < 1 << 18
    model, optimizer, call = built(shutil.copytree(tmp_path, f"{tmp_path}-left"))
    assert l2l_compile.resume(call).steps == 3 and model[1].num_batches_tracked == 3
    for number in range(3, 5):
        step(optimizer, call, number)
    found = model.state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("update", MODES)
def test_a_loaded_checkpoint_leaves_the_last_complete_step(update, tmp_path):
    """New state takes new places; those of the old state are free when a step without them was committed."""
    made = begun(tmp_path, update=update)
    made.step(2)
    saved = made.optimizer.state_dict()
    saved["state"] = {n: {k: v.clone() for k, v in state.items()} for n, state in saved["state"].items()}
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    four = made.tensors()
    made.optimizer.load_state_dict(saved)
    made.step(1)
    made = begun(left_of(made, tmp_path), update=update)
    assert made.number == 4 and same(four, made.tensors())
    made.step(4)
    assert made.stored.store.file.size < 4 * made.stored.plan.placement.on_disk


@pytest.mark.parametrize("update", MODES)
def test_readers_see_the_last_step_on_a_slow_disk(update, tmp_path):
    wanted = expected(steps=3, update=update)[: 2 * (LAYERS + 2)]
    with slow_disk(Faults(rate=QUICKER)):
        made = begun(tmp_path, update=update)
        made.step(3)
        assert same(wanted, [t.clone() for t in made.model.state_dict().values()])


def test_a_skipped_step_is_a_complete_one(tmp_path):
    """Its gradients overflow in fp16: its commit names the same places, and the halved loss scale."""
    made = begun(tmp_path, update="in_forward", precision="fp16")
    made.step(2)
    l2l_compile.synchronize(made.call)
    before, scale = made.tensors(), l2l_compile.stats(made.call).loss_scale
    (made.call(torch.ones(6, 5)).sum() * 1e9).backward()
    made.optimizer.step()
    l2l_compile.commit(made.call, wait=True)
    assert l2l_compile.stats(made.call).skipped_steps >= 1
    again = begun(left_of(made, tmp_path), update="in_forward", precision="fp16")
    assert again.number == 3 and same(before, again.tensors())
    assert again.optimizer.param_groups[0]["l2l_loss_scale"][0] == scale / 2


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_copies_on_disk_are_made_anew_behind_a_kill(update, tmp_path):
    """They are in a file of their own, and in no commit."""
    options = {"update": update, "precision": "bf16"}
    expected = training("adamw", **options)
    expected.step(5)
    folder = tmp_path / "0"
    folder.mkdir()
    for steps in (2, 5):
        with slow_disk(Faults(rate=6e7)):
            made = training("adamw", disk=folder, stored_copies=True, resumable=True, **options)
            made.number = l2l_compile.resume(made.call).steps
            made.step(steps - made.number)
            l2l_compile.commit(made.call, wait=True)
            assert made.stored.plan.copies and made.stored.store_of_copies() is not made.stored.store
        folder = shutil.copytree(folder, tmp_path / str(steps))
    assert same(expected.tensors(), made.tensors())


def test_weights_of_another_file_become_those_of_the_run(tmp_path):
    """As `load_pretrained(disk=...)` leaves them."""
    expected = training("adamw", update="in_backward")
    expected.step(3)
    made = training("adamw", disk=tmp_path, resumable=True, update="in_backward")
    other = DiskStore(str(tmp_path))
    for parameter in made.model.parameters():
        if parameter.nbytes >= 1 << 20:
            parameter.data = moved_to_disk(other, parameter)
    l2l_compile.resume(made.call)
    made.step(3)
    l2l_compile.commit(made.call, wait=True)
    assert same(expected.tensors(), made.tensors())
    assert all(range_of(p).store is made.stored.store for p in made.model.parameters() if p.nbytes >= 1 << 20)


def test_a_layer_that_was_frozen_is_kept_by_later_runs(tmp_path):
    """Its last run does not train it, and must not take it for one that the user has built."""
    folder = tmp_path / "0"
    folder.mkdir()
    made = begun(folder)
    made.step(2)
    made.model[1][0].weight.requires_grad_(False)
    made.step(1)
    trained = made.model[1][0].weight.detach().clone()
    for number in range(2):
        l2l_compile.commit(made.call, wait=True)
        folder = shutil.copytree(folder, tmp_path / str(number + 1))
        made = begun(folder)
        made.model[1][0].weight.requires_grad_(False)
        assert torch.equal(made.model[1][0].weight, trained)
        made.step(1)


@pytest.mark.parametrize("resumable", [False, True])
def test_a_layer_that_is_unfrozen_moves_to_the_disk(resumable, tmp_path):
    def trained(disk):
        model = matrices()
        weight = model[1][0].weight.requires_grad_(False)
        torch._dynamo.reset()
        made = training_of(model, "adamw", disk, spare=2 << 20, update="in_forward", **({"resumable": resumable} if disk else {}))
        if disk and resumable:
            l2l_compile.resume(made.call)
        made.step(2)
        weight.requires_grad_(True)
        torch._dynamo.reset()  # PyTorch 2.11 does not compile again by itself
        made.step(3)
        return made, weight

    (expected, _), (made, weight) = trained(None), trained(tmp_path)
    assert same(expected.tensors(), made.tensors())
    held = [weight, *(v for v in made.optimizer.state[weight].values() if v.dim())]
    assert all(range_of(t) is not None for t in held) or not resumable


def test_state_of_an_earlier_file_becomes_that_of_the_run(tmp_path):
    expected = training("adamw", update="in_backward")
    expected.step(4)
    before = training("adamw", disk=tmp_path, update="in_backward")
    before.step(2)
    l2l_compile.synchronize(before.call)
    torch._dynamo.reset()
    options = {"update": "in_backward", "disk": tmp_path, "resumable": True, "host_memory": "1GB"}
    call = compiled(before.model, optimizer=before.optimizer, **options)
    l2l_compile.resume(call)
    made = Training(before.model, before.optimizer, call, number=2)
    made.step(2)
    l2l_compile.commit(call, wait=True)
    assert same(expected.tensors(), made.tensors())
    states = [v for state in made.optimizer.state.values() for v in state.values() if v.dim() and v.nbytes >= 1 << 20]
    assert all(range_of(v).store is made.stored.store for v in states)


def test_a_relative_folder_stays_where_it_is(tmp_path, monkeypatch):
    """Though the process goes to another folder, which has one of this name too."""
    for place in ("here", "there"):
        (tmp_path / place / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    made = begun("run")
    made.step()
    monkeypatch.chdir(tmp_path / "there")
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    assert not list((tmp_path / "there" / "run").iterdir())
    assert begun(shutil.copytree(tmp_path / "here" / "run", tmp_path / "copied")).number == 3


def test_a_commit_that_is_waited_for_is_there(tmp_path):
    """Also if the updates of its step are made late."""
    with slow_disk(Faults(rate=2e7)):
        made = begun(tmp_path, update="in_forward")
        for steps in (1, 2):
            made.step(1)
            l2l_compile.commit(made.call, wait=True)
            assert read_manifest(str(tmp_path))["contents"]["steps"] == steps
