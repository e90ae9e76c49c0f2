"""Each rank of a pipeline keeps the parameters and optimizer state of its stages on a disk (the option `disk`): equal bits."""

from __future__ import annotations

import pytest
import torch
from test_pipeline_width import mesh_of
from test_stored_failures import assert_others_name_rank_1, one_fails
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.disk.disk_store import range_of
from l2l_compile.ranks.sharded import local
from slow_disk import Faults, slow_disk
from stored_training import SLOW, WIDTH, Training, WithLoss, same, training_of

MATRIX = WIDTH * WIDTH * 4  # bytes
KINDS = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward", "max_grad_norm": 0.1},
    "delayed": {"update": "in_forward", "delay": 1},
    "1f1b": {"update": "in_forward", "schedule": "1f1b"},
    "without flush": {"update": "in_forward", "schedule": "1f1b", "delay": 1},
}


def staged(optimizer: str, world: int, disk: str | None, kind: str, width: str | None = None, **options) -> Training:
    """A pipeline over all ranks; with `width`, over two, each of whose stages is sharded or repeated."""
    torch._dynamo.reset()
    model = WithLoss(2 if width == "shards" else 1)
    loops = 1 if "schedule" in KINDS[kind] else None
    mesh, shards = init_device_mesh("cpu", (world,)), None
    if width is not None:
        _, shards, mesh = mesh_of(width)
    l2l_compile.pipeline(model, mesh, torch.ones(6, 5), loops=loops)
    if shards is not None:
        l2l_compile.shard(model, shards)
    return training_of(model, optimizer, disk, outputs="loss", **KINDS[kind], **options)


def large_ones(made: Training) -> list[torch.Tensor]:
    """The large ones of the shards of parameters and of their state."""
    parameters = list(made.model.parameters())
    states = [v for p in parameters for v in made.optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [local(t) for t in (*parameters, *states) if local(t).nbytes >= MATRIX]


def equal_bits(rank, world, optimizer, kind, folder, options):
    without = staged(optimizer, world, None, kind, **options)
    without.step(5)
    expected = without.tensors()
    for rate in (None, SLOW):
        with slow_disk(Faults(rate=rate)):
            made = staged(optimizer, world, folder, kind, **options)
            made.step(5)
            assert same(expected, made.tensors()), rate
    held = large_ones(made)
    assert held and all(range_of(t) is not None for t in held)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "adafactor"])
@pytest.mark.slow(but=("adamw-bf16-without flush", "lamb-fp32-in_backward", "sgd-bf16-1f1b"))
def test_bits_of_stages_are_those_without_disk(ranks, optimizer, precision, kind, tmp_path):
    ranks.run(equal_bits, optimizer, kind, str(tmp_path), {"precision": precision}, world=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", ["shards", "replicas"])
@pytest.mark.slow(but="shards-delayed")
def test_bits_of_sharded_stages_are_those_without_disk(ranks, width, kind, tmp_path):
    ranks.run(equal_bits, "adamw", kind, str(tmp_path), {"width": width, "precision": "bf16"}, world=4)


def equal_bits_with_late_updates(rank, world, folder):
    expected = staged("adamw", world, None, "in_backward")
    expected.step(5)
    for rate in (None, SLOW):
        with slow_disk(Faults(rate=rate)):
            made = staged("adamw", world, folder, "in_backward", spare=200_000 + MATRIX)
            made.step(5)
            assert same(expected.tensors(), made.tensors())
    return len(made.stored.late)


def test_late_updates_of_stages_change_no_bit(ranks, tmp_path):
    """Those that go on in the next forward, where the disk would be idle: one matrix of each stage."""
    assert ranks.run(equal_bits_with_late_updates, str(tmp_path), world=2) == [1, 1]


def moves_the_bytes_of_its_plan(rank, world, kind, folder):
    made = staged("adamw", world, folder, kind)
    made.step(5)
    of_step = l2l_compile.stats(made.call)
    wanted = made.stored.plan.placement.on_disk
    l2l_compile.synchronize(made.call)
    assert wanted == sum(t.nbytes for t in large_ones(made)) > 0
    assert of_step.disk_written_bytes == wanted and wanted <= of_step.disk_read_bytes <= wanted * 1.05  # samples of a few pages
    return wanted


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_moves_the_bytes_of_its_own_plan(ranks, kind, tmp_path):
    """Three matrices with their moments, on both ranks together."""
    assert sum(ranks.run(moves_the_bytes_of_its_plan, kind, str(tmp_path), world=2)) == 3 * 3 * MATRIX


def reads_ahead(rank, world, kind, folder):
    """In the order of the step before: no update asks for a chunk that is not on its way."""
    made = staged("sgd", world, folder, kind)
    made.step(4)
    l2l_compile.synchronize(made.call)
    asked, begin = [], made.stored.ring._begin_to_read
    made.stored.ring._begin_to_read = lambda chunk: asked.append(chunk) or begin(chunk)
    made.step(2)
    l2l_compile.synchronize(made.call)
    return len(asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but="without flush")
def test_chunks_of_stages_are_read_before_their_update(ranks, kind, tmp_path):
    assert ranks.run(reads_ahead, kind, str(tmp_path), world=2) == [0, 0]


def fails(rank, world, kind, faults, folder):
    return one_fails(rank, faults, lambda: staged("adamw", world, folder, kind))


PLACES = {"no room": {"room": 1 << 20}, "in a read": {"read_fails": (5, 9 << 20)}, "in a write": {"write_fails": (5, 14 << 20)}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but=("without flush-in a read", "1f1b-no room", "in_forward-in a write"))
def test_other_stages_name_the_rank_whose_disk_fails(ranks, kind, place, tmp_path):
    found = ranks.run(fails, kind, PLACES[place], str(tmp_path), world=2, seconds=40)
    assert_others_name_rank_1(found, "No space left on device" if place == "no room" else "Input/output error", tmp_path)
