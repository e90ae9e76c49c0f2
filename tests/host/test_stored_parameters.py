"""Parameters and optimizer state on disk (options `disk`, `host_memory`): equal bits, also where the disk is slow."""

from __future__ import annotations

import copy
import io
import os
import tempfile

import pytest
import torch

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.disk.chunk_ring import ChunkRing
from l2l_compile.disk.disk_store import range_of
from l2l_compile.session import session_of
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, OPTIMIZERS, RING, SLOW, WIDTH, same, training

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
QUICKER = 6e7  # bytes a second: slow enough to lag behind a small model
MATRIX = WIDTH * WIDTH * 4


def trained(optimizer: str, steps: int = 5, **options) -> list[torch.Tensor]:
    made = training(optimizer, **options)
    made.step(steps)
    return made.tensors()


def cases():
    """Every second one of the slowed ones runs in `make slow` alone."""
    for optimizer in OPTIMIZERS:
        for mode in MODES:
            for precision in ("fp32", "bf16", "fp16"):
                if precision != "fp16" or mode != "in_backward":
                    is_quick = optimizer == "adamw" and precision == "bf16" or (optimizer, mode) == ("sgd", "delayed")
                    is_quick |= (optimizer, mode, precision) in (("lamb", "in_forward", "fp32"), ("lion", "in_backward", "fp32"))
                    marks = () if is_quick and precision != "fp16" else pytest.mark.slow
                    yield pytest.param(optimizer, mode, precision, id=f"{optimizer}-{mode}-{precision}", marks=marks)


@pytest.mark.parametrize(("optimizer", "mode", "precision"), list(cases()))
def test_bits_are_those_of_training_without_disk(optimizer, mode, precision, tmp_path):
    options = {**MODES[mode], "precision": precision, "steps": 8 if precision == "fp16" else 5}  # the first in fp16 are skipped
    expected = trained(optimizer, **options)
    for rate in (SLOW, None):
        with slow_disk(Faults(rate=rate)):
            assert same(expected, trained(optimizer, disk=tmp_path, **options)), f"at {rate} bytes a second"


@pytest.mark.parametrize("mode", MODES)
def test_own_steps_take_parameters_whole(mode, tmp_path):
    options = {**MODES[mode], "compile_update": False}
    expected = trained("adamw", 3, **options)
    with slow_disk(Faults(rate=QUICKER)):
        assert same(expected, trained("adamw", 3, disk=tmp_path, **options))


@pytest.mark.parametrize("mode", ["in_backward", "delayed"])
def test_half_of_the_state_in_memory_changes_no_bit(mode, tmp_path):
    expected = trained("adamw", 3, **MODES[mode])
    with slow_disk(Faults(rate=QUICKER)):
        made = training("adamw", disk=tmp_path, spare=LAYERS * 2 * MATRIX, **MODES[mode])
        made.step(3)
        placed = made.stored.plan.placement
        assert any(placed.states) and not any(placed.masters), "the state of some parameters is enough"
        assert same(expected, made.tensors())


def test_bytes_of_a_step_are_those_of_parameters_and_state(tmp_path):
    """The first step reads no state, since it makes it. Every one of the others reads and writes all of it, once."""
    made = training("adamw", disk=tmp_path, update="in_backward")
    made.step()
    store = made.stored.store
    assert store.read_bytes == LAYERS * MATRIX and store.written_bytes == LAYERS * (1 + 3) * MATRIX
    made.step(2)
    assert store.read_bytes == LAYERS * (1 + 6) * MATRIX and store.written_bytes == LAYERS * (4 + 6) * MATRIX
    of_step = l2l_compile.stats(made.call)
    assert of_step.disk_read_bytes == of_step.disk_written_bytes == made.stored.plan.placement.on_disk == LAYERS * 3 * MATRIX


@pytest.mark.parametrize("mode", ["in_forward", "delayed"])
def test_figures_of_later_updates_are_of_the_step_before(mode, tmp_path):
    with slow_disk(Faults(rate=QUICKER)):
        made = training("adamw", disk=tmp_path, **MODES[mode])
        made.step(4)
        of_step = l2l_compile.stats(made.call)
    wanted = LAYERS * 3 * MATRIX
    assert of_step.disk_written_bytes == wanted and wanted <= of_step.disk_read_bytes <= wanted + LAYERS * 8 * 4096
    assert of_step.disk_wait_seconds > 0.01 and "disk_wait_seconds" in str(of_step)


def test_explain_says_what_is_on_disk_and_what_a_step_writes(tmp_path):
    """The figures are those of the run: 9.0 MiB of masters and moments, of which 0.2 MiB of small tensors stay in memory."""
    made = training("adamw", disk=tmp_path, update="in_backward")
    report = l2l_compile.explain(made.call)(torch.ones(6, 5))
    made.step(2)
    of_step = l2l_compile.stats(made.call)
    assert report.host_memory.disk.placement == made.stored.plan.placement
    assert report.host_memory.disk.placement.on_disk == of_step.disk_written_bytes
    assert "disk: master 3.0 MiB, optimizer state 6.0 MiB, in all 9.0 MiB, read and written" in " ".join(str(report).split())
    assert report.host_memory.master + report.host_memory.optimizer_state < 200_000


@pytest.mark.parametrize("asked", [l2l_compile.explain, None])
def test_a_budget_that_is_too_small_is_named_before_a_step(asked, tmp_path):
    made = training("adamw", disk=tmp_path, spare=1, update="in_backward")
    said = r"host_memory=\S+ MiB is too small even with all large parameters on disk: .* raise host_memory to \S+ MiB"
    with pytest.raises(L2LError, match=said):
        made.step() if asked is None else asked(made.call)(torch.ones(6, 5))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
def test_a_folder_in_memory_is_one_like_others():
    expected = trained("adamw", 2, update="in_backward")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert same(expected, trained("adamw", 2, disk=folder, update="in_backward"))


def test_a_folder_that_is_removed_while_training_is_not_missed(tmp_path):
    expected = trained("adamw", 3, update="in_backward")
    folder = tmp_path / "gone"
    folder.mkdir()
    made = training("adamw", disk=folder, update="in_backward")
    made.step()
    folder.rmdir()
    made.step(2)
    assert same(expected, made.tensors())


def test_a_large_tensor_passes_through_a_small_ring(tmp_path):
    """Each matrix with its moments is three times a buffer, and the ring has as many buffers as ever."""
    made = training("adamw", disk=tmp_path, update="in_backward")
    made.step(2)
    assert made.stored.ring.bytes == RING and made.stored.plan.buffer * 3 == 3 * MATRIX
    chunks = [chunk for chunk in made.stored.ring._taken if chunk.spans]
    assert len(chunks) >= 3 * LAYERS and all(sum(span.size for span in c.spans) <= made.stored.plan.buffer for c in chunks)


def test_large_tensors_are_on_disk_and_small_ones_are_not(tmp_path):
    made = training("adamw", disk=tmp_path, update="in_backward")
    made.step()
    for parameter in made.model.parameters():
        held = [parameter, *(v for v in made.optimizer.state[parameter].values() if v.dim())]
        assert all((range_of(t) is not None) == (parameter.nbytes >= MATRIX) for t in held)
    assert os.listdir(tmp_path) == [], "the file has no name"


def test_every_stored_tensor_has_a_version_of_its_own(tmp_path):
    """Views of one mapping would share one: each update would make the wires of all parameters old."""
    made = training("adamw", disk=tmp_path, update="in_backward")
    made.step()
    stored = [p for p in made.model.parameters() if range_of(p) is not None]
    before = [p._version for p in stored]
    with torch.no_grad():
        stored[0].mul_(0.5)
    assert [p._version - b for p, b in zip(stored, before, strict=True)] == [1] + [0] * (len(stored) - 1)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in stored), "torch.save writes no more than the tensor"


@pytest.mark.parametrize("mode", MODES)
def test_reads_of_the_user_wait_for_the_slow_disk(mode, tmp_path):
    """`state_dict()`, a copy, a norm, and a parameter that is read behind `optimizer.step()`."""
    expected = training("adamw", **MODES[mode])
    expected.step(2)
    wanted = expected.model.state_dict()
    wanted = {name: value.clone() for name, value in wanted.items()}
    for read in (
        lambda made: made.model.state_dict(),
        lambda made: copy.deepcopy(made.model).state_dict(),
        lambda made: {name: p.detach() + 0.0 for name, p in made.model.named_parameters()},
    ):
        with slow_disk(Faults(rate=QUICKER)):
            made = training("adamw", disk=tmp_path, **MODES[mode])
            made.step(2)
            found = read(made)
            assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_read_waits_for_a_write_whose_update_is_over(tmp_path, monkeypatch):
    """Its update was done before `optimizer.step()` returned, so nothing else is waited for."""
    with slow_disk(Faults(rate=SLOW)):
        made = training("sgd", disk=tmp_path, update="in_forward")
        made.step(2)
        updates = session_of(made.call).server.updates
        weight = made.model[LAYERS][0].weight
        made.backward()

        def look():
            updates.worker.drain()
            written.append(bool(made.stored.being_written([weight])))
            return watch_now()

        watch_now, written = updates._watch_now, []
        monkeypatch.setattr(updates, "_watch_now", look)
        made.optimizer.step()
        found = weight + 0.0
        l2l_compile.synchronize(made.call)
        assert written[0] and torch.equal(found, weight)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_are_read_before_their_update_asks(mode, tmp_path, monkeypatch):
    """As many as there are buffers; the order is that of the step before."""
    asked = []
    begin = ChunkRing._begin_to_read
    monkeypatch.setattr(ChunkRing, "_begin_to_read", lambda ring, chunk: asked.append(chunk) or begin(ring, chunk))
    made = training("sgd", disk=tmp_path, **MODES[mode])
    made.step(3)
    made.tensors()
    before = len(asked)
    made.step(2)
    made.tensors()
    assert before and len(asked) == before


def test_updates_that_a_held_forward_kept_waiting_are_written(tmp_path):
    """With `in_backward`, they are made in `optimizer.step()`, which returns when they can be read."""

    def held(disk):
        made = training("adamw", disk=disk, update="in_backward")
        made.step(2)
        kept = made.call(torch.ones(6, 5))
        made.backward()
        made.optimizer.step()
        del kept
        return [p.detach().clone() for p in made.model.parameters()]

    with slow_disk(Faults(rate=QUICKER)):
        assert same(held(None), held(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_behind_a_step_sees_its_update(mode, tmp_path):
    x = torch.ones(6, 5)
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=QUICKER)), torch.no_grad():
            made = training("adamw", disk=disk, **MODES[mode])
            with torch.enable_grad():
                made.step(2)
            found.append(made.call(x).clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_of_the_user_between_steps_are_seen(mode, precision, tmp_path):
    """A write that PyTorch records, one that it does not, and one into the state. No chunk was read too early."""

    def written(disk):
        made = training("adamw", disk=disk, **MODES[mode], precision=precision)
        made.step(2)
        l2l_compile.synchronize(made.call)
        weight = made.model[1][0].weight
        with torch.no_grad():
            weight.clamp_(-0.01, 0.01)
        made.step()
        l2l_compile.synchronize(made.call)
        made.model[2][0].weight.data.mul_(0.5)
        made.optimizer.state[weight]["exp_avg"].zero_()
        made.step()
        return made.tensors()

    expected = written(None)
    with slow_disk(Faults(rate=QUICKER)):
        assert same(expected, written(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_resumes_with_equal_bits(mode, tmp_path):
    """Saved from the disk, and loaded into a model that has begun on one, and into one without."""
    whole = training("adamw", **MODES[mode])
    whole.step(4)
    expected = whole.tensors()
    with slow_disk(Faults(rate=QUICKER)):
        made = training("adamw", disk=tmp_path, **MODES[mode])
        made.step(2)
        file = io.BytesIO()
        torch.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}, file)
        assert file.tell() < 1.2 * (3 * LAYERS * MATRIX) + (LAYERS * MATRIX if mode == "delayed" else 0)
        for disk in (tmp_path, None):
            again = training("adamw", disk=disk, **MODES[mode])
            again.step(1)
            file.seek(0)
            saved = torch.load(file)
            again.model.load_state_dict(saved["model"])
            again.optimizer.load_state_dict(saved["optimizer"])
            again.number = 2
            again.step(2)
            assert same(expected, again.tensors())
