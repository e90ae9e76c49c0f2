"""Each rank keeps its shards of parameters and optimizer state on a disk (the option `disk`): equal bits, in a store of its own."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import l2l_compile
from l2l_compile.disk.disk_store import range_of
from l2l_compile.host.disk_plan import can_move
from l2l_compile.ranks.sharded import is_sharded, local
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, SLOW, WIDTH, same, training

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
