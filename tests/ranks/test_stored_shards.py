"""Each rank keeps its shards of parameters and optimizer state on a disk (the option `disk`): equal bits, in a store of its own."""

from __future__ import annotations

import functools
import io
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.devices import host
from l2l_compile.disk.disk_store import range_of
from l2l_compile.host.disk_plan import can_move, disk_plan
from l2l_compile.object_copies import tensors_within
from l2l_compile.options import Options
from l2l_compile.ranks.sharded import is_sharded, local
from l2l_compile.session import session_of
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, SLOW, WIDTH, matrices, same, training

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
QUICKER = 6e7  # bytes a second: slow enough to lag behind a small model
MATRIX = WIDTH * WIDTH * 4  # bytes of a shard


def mesh_of(kind: str, world: int) -> DeviceMesh:
    if kind == "shards":
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def equal_bits(rank, world, kind, optimizer, rates, folder, options):
    found = []
    for rate in (None, *rates):
        with slow_disk(Faults(rate=rate)):
            made = training(optimizer, disk=folder if found else None, mesh=mesh_of(kind, world), **options)
            made.step(5)
            found.append(made.tensors())
    assert all(same(found[0], other) for other in found[1:])
    held = [t for p in made.model.parameters() for t in (p, *made.optimizer.state[p].values()) if local(p).nbytes >= MATRIX]
    assert len(held) >= LAYERS and all(is_sharded(t) and range_of(local(t)) is not None for t in held if t.dim())


@pytest.mark.filterwarnings("ignore:.*are on one device")
def test_each_rank_stripes_its_shards_over_all_folders(ranks, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    ranks.run(striped_shards, [str(tmp_path / name) for name in ("a", "b")], world=2)


def striped_shards(rank, world, folders):
    mesh = mesh_of("shards", world)
    without = training("adamw", mesh=mesh, update="in_backward")
    without.step(3)
    with slow_disk(Faults(rate=SLOW)) as faults:
        made = training("adamw", disk=folders, mesh=mesh, update="in_backward")
        made.step(3)
        assert same(without.tensors(), made.tensors())
    written = [file._moved["write"] for file in faults.files]
    assert len(written) == 2 and 0.4 < written[0] / sum(written) < 0.6, "a file in each folder, of this rank"


def cases():
    """The rank count, the mesh and the way to update; all but a few run in `make slow` alone."""
    for optimizer in ("adamw", "sgd", "adagrad", "own step"):
        for mode in MODES:
            for precision in ("fp32", "bf16"):
                quick = {("adamw", "delayed", "bf16"), ("sgd", "in_backward", "fp32"), ("own step", "in_forward", "bf16")}
                marks = () if (optimizer, mode, precision) in quick else pytest.mark.slow
                yield pytest.param(optimizer, mode, precision, id=f"{optimizer}-{mode}-{precision}", marks=marks)


@pytest.mark.parametrize(("optimizer", "mode", "precision"), list(cases()))
def test_bits_of_shards_are_those_without_disk(ranks, optimizer, mode, precision, tmp_path):
    """A step of one's own takes the shards whole."""
    options = {**MODES[mode], "precision": precision, "compile_update": optimizer != "own step"}
    name = "adamw" if optimizer == "own step" else optimizer
    ranks.run(equal_bits, "shards", name, (None, SLOW), str(tmp_path), options, world=2)


def equal_bits_with_late_updates(rank, world, kind, folder):
    expected = training("adamw", mesh=mesh_of(kind, world), update="in_backward")
    expected.step(5)
    for rate in (None, SLOW):
        with slow_disk(Faults(rate=rate)):
            made = training("adamw", disk=folder, spare=200_000 + MATRIX, mesh=mesh_of(kind, world), update="in_backward")
            made.step(5)
            assert len(made.stored.late) == 1
            assert same(expected.tensors(), made.tensors())


@pytest.mark.parametrize("kind", ["shards", pytest.param("replicas", marks=pytest.mark.slow)])
def test_late_updates_of_shards_change_no_bit(ranks, kind, tmp_path):
    """Those that go on in the next forward, where the disk would be idle."""
    ranks.run(equal_bits_with_late_updates, kind, str(tmp_path), world=2 if kind == "shards" else 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.slow(but="replicas-delayed")
def test_bits_of_four_ranks_are_those_without_disk(ranks, kind, mode, tmp_path):
    ranks.run(equal_bits, kind, "adamw", (None, QUICKER), str(tmp_path), {**MODES[mode], "precision": "bf16"}, world=4)


def the_last_shard_is_alone_in_its_storage(rank, world):
    """It has 532 rows, and the others 534."""
    layer = l2l_compile.shard(nn.Linear(WIDTH, 1600), init_device_mesh("cpu", (world,)))
    shard = local(dict(layer.named_parameters())["weight"])
    assert shard.nbytes >= MATRIX and shard.shape[0] == (532 if rank == 2 else 534)
    assert can_move(shard)


def test_a_shard_with_fewer_rows_may_be_on_disk(ranks):
    ranks.run(the_last_shard_is_alone_in_its_storage, world=3)


def moves_the_bytes_of_its_plan(rank, world, kind, folder):
    """The first step reads no state, since it makes it. Every one of the others reads and writes all of it, once."""
    made = training("adamw", disk=folder, mesh=mesh_of(kind, world), update="in_backward")
    made.step()
    store = made.stored.store
    assert store.read_bytes == LAYERS * MATRIX and store.written_bytes == LAYERS * (1 + 3) * MATRIX
    made.step(2)
    assert store.read_bytes == LAYERS * (1 + 6) * MATRIX and store.written_bytes == LAYERS * (4 + 6) * MATRIX
    of_step = l2l_compile.stats(made.call)
    assert of_step.disk_read_bytes == of_step.disk_written_bytes == made.stored.plan.placement.on_disk == LAYERS * 3 * MATRIX


@pytest.mark.parametrize(("kind", "world"), [("shards", 2), ("replicas", 4)])
def test_each_rank_moves_the_bytes_of_its_own_plan(ranks, kind, world, tmp_path):
    ranks.run(moves_the_bytes_of_its_plan, kind, str(tmp_path), world=world)


def explain_says_what_the_run_has(rank, world, folder):
    made = training("adamw", disk=folder, mesh=mesh_of("shards", world), update="in_backward")
    report = l2l_compile.explain(made.call)(torch.ones(6, 5))
    made.step(2)
    assert report.host_memory.disk == made.stored.plan
    assert report.host_memory.disk.placement.on_disk == l2l_compile.stats(made.call).disk_written_bytes
    assert report.host_memory.master + report.host_memory.optimizer_state < 200_000


def test_explain_says_what_each_rank_has_on_disk(ranks, tmp_path):
    ranks.run(explain_says_what_the_run_has, str(tmp_path))


def has_its_part_of_the_host(rank, world, folder):
    """Two ranks of a host with 10 GB: torchrun says how many there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "available_memory", lambda: 10**10)
        model = l2l_compile.shard(matrices(world), init_device_mesh("cpu", (world,)))
        options = Options.build({"optimizer": torch.optim.SGD(model.parameters()), "update": "in_backward", "disk": folder})
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(L2LError, match="LOCAL_WORLD_SIZE.* is not set. Give each rank its part with the option host_memory"):
            disk_plan(options, 0)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        held = sum(local(p).nbytes for p in model.parameters())
        assert disk_plan(options, 0).budget == int(0.8 * (10**10 // 2 + held))


def test_ranks_of_a_host_divide_its_memory(ranks, tmp_path):
    ranks.run(has_its_part_of_the_host, str(tmp_path))


def by_name(state_dict):
    """The state, in the order of names: a first step makes that of small parameters first."""
    return [state_dict["state"][name] for name in sorted(state_dict["state"])]


def a_read_waits(rank, world, mode, folder):
    """Of a parameter, of a state_dict and of a distributed checkpoint's: each sees the whole step, whose write is late."""
    read = {
        "parameters": lambda made: [local(p + 0.0).detach() for p in list(made.model.parameters())[::-1]],
        "state_dict": lambda made: [local(t).clone() for t in made.model.state_dict().values()],
        "checkpoint": lambda made: [local(t).clone() for t in get_model_state_dict(made.model).values()],
        "state": lambda made: [
            local(t).clone() for t in tensors_within(by_name(get_optimizer_state_dict(made.model, made.optimizer)))
        ],
    }
    for way, of in read.items():
        found = []
        for disk in (None, folder):
            with slow_disk(Faults(rate=SLOW)):
                made = training("adamw", disk=disk, mesh=mesh_of("shards", world), **MODES[mode])
                made.step(2)
                found.append(of(made))
        assert same(*found), way


@pytest.mark.parametrize("mode", MODES)
def test_readers_of_shards_wait_for_the_slow_disk(ranks, mode, tmp_path):
    ranks.run(a_read_waits, mode, str(tmp_path))


def a_read_waits_for_a_write(rank, world, folder):
    with slow_disk(Faults(rate=SLOW)):
        made = training("sgd", disk=folder, mesh=mesh_of("shards", world), update="in_forward")
        made.step(2)
        updates = session_of(made.call).server.updates
        weight = dict(made.model.named_parameters())[f"{LAYERS}.0.weight"]
        made.backward()

        def look():
            updates.worker.drain()
            written.append(bool(made.stored.being_written([weight])))
            return watch_now()

        watch_now, written = updates._watch_now, []
        updates._watch_now = look
        made.optimizer.step()
        found = weight + 0.0
        l2l_compile.synchronize(made.call)
        assert written[0] and torch.equal(local(found), local(weight))


def test_a_read_of_a_shard_waits_for_its_write(ranks, tmp_path):
    """Its update was done before `optimizer.step()` returned, so nothing else is waited for."""
    ranks.run(a_read_waits_for_a_write, str(tmp_path))


def resumes(rank, world, kind, mode, folder):
    """A distributed checkpoint, and one of `torch.save`, saved from the disk and loaded into a model with a disk and one without."""
    begun = functools.partial(training, "adamw", **MODES[mode])
    mesh = mesh_of(kind, world)
    whole = begun(mesh=mesh)
    whole.step(4)
    expected = whole.tensors()
    with slow_disk(Faults(rate=QUICKER)):
        made = begun(disk=folder, mesh=mesh)
        made.step(2)
        model, optimizer = get_state_dict(made.model, made.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/checkpoint")
        file = io.BytesIO()
        torch.save((made.model.state_dict(), made.optimizer.state_dict()), file)
        for disk, is_distributed in itertools.product((folder, None), (True, False)):
            again = begun(disk=disk, mesh=mesh)
            again.step(1)
            if is_distributed:
                model, optimizer = get_state_dict(again.model, again.optimizer)
                dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/checkpoint")
                set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            else:
                file.seek(0)
                model, optimizer = torch.load(file, weights_only=False)
                again.model.load_state_dict(model)
                again.optimizer.load_state_dict(optimizer)
            again.number = 2
            again.step(2)
            assert same(expected, again.tensors()), (disk, is_distributed)
            if disk is not None:
                held = [local(t) for p in again.model.parameters() for t in (p, *again.optimizer.state[p].values())]
                assert all(range_of(t) is not None for t in held if t.nbytes >= MATRIX), "state that was loaded goes to the disk"


@pytest.mark.parametrize(("kind", "world", "mode"), [("shards", 2, "in_backward"), ("replicas", 4, "in_forward")])
def test_a_checkpoint_of_shards_resumes_with_equal_bits(ranks, kind, world, mode, tmp_path):
    ranks.run(resumes, kind, mode, str(tmp_path), world=world)
