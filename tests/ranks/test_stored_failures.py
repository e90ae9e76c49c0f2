"""A rank whose disk is full, fails or has too small a budget: its own error says why, and the others name the rank within seconds."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_stored_shards import MODES, mesh_of

from l2l_compile import DiskError, L2LError, RankError
from l2l_compile.ranks.watch import Watch
from slow_disk import Faults, slow_disk
from stored_training import Training, training

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

SECONDS = 5.0
PLACES = {
    "no room": {"room": 4 << 20},  # bytes: the file is allocated before the first step
    "while parameters move": {"write_fails": (errno.EIO, 1 << 20)},
    "in the first step": {"write_fails": (errno.EIO, 7 << 20)},
    "in a later read": {"read_fails": (errno.EIO, 20 << 20)},
}


def one_fails(rank: int, faults: dict, begun: Callable[[], Training]) -> tuple[str, str, float]:
    """The error of each rank, and when it was raised. Rank 1 has the faults, and catches its error."""
    with slow_disk(Faults(**faults) if rank == 1 else Faults()):
        made = begun()
        with pytest.raises(L2LError) as caught:
            made.step(7)
    return type(caught.value).__name__, str(caught.value), time.time()


def assert_others_name_rank_1(found: list[tuple[str, str, float]], error: str, folder: Path) -> None:
    name, text, since = found.pop(1)
    said = f"{folder}: {error} while "
    assert name == "DiskError" and text.startswith(said)
    for name, text, when in found:
        assert name == "RankError" and text.startswith(f"rank 1 failed: l2l_compile.errors.DiskError: {said}")
        assert when - since < SECONDS


def fails(rank, world, kind, faults, options, folder):
    return one_fails(rank, faults, lambda: training("adamw", disk=folder, mesh=mesh_of(kind, world), **options))


def test_a_rank_that_waits_for_others_raises_its_own_disk_error(tmp_path):
    """They have left the collective for which it waits, since they know already."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    watches = [Watch(dist.PrefixStore("of ranks", store.clone()), rank, 2) for rank in range(2)]
    watches[1].tell(DiskError("/nvme: broken"))
    for rank, error in enumerate((RankError, DiskError)):
        until = time.monotonic() + SECONDS
        while watches[rank].failure is None and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(error, match="/nvme: broken"):
            watches[rank].check()
        assert type(watches[rank].explain(RuntimeError())) is error
        watches[rank].close()


def small_budget(rank, world, folder):
    """Rank 1 has too little, which only it knows."""
    made = training("adamw", disk=folder, mesh=mesh_of("shards", world), spare=1 if rank else 200_000, update="in_backward")
    with pytest.raises(L2LError) as caught:
        made.step()
    return str(caught.value)


def test_a_budget_too_small_on_one_rank_is_told_to_the_others(ranks, tmp_path):
    told, own = ranks.run(small_budget, str(tmp_path), seconds=40)
    assert own.startswith("host_memory=") and told.startswith(f"rank 1 failed: l2l_compile.errors.L2LError: {own}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "world"), [("shards", 2), ("replicas", 4)])
@pytest.mark.slow(but=("shards-2-no room-in_backward", "shards-2-in a later read-*", "replicas-4-while*-in_forward"))
def test_other_ranks_name_the_rank_whose_disk_fails(ranks, kind, world, place, mode, tmp_path):
    found = ranks.run(fails, kind, PLACES[place], MODES[mode], str(tmp_path), world=world, seconds=80)
    assert_others_name_rank_1(found, os.strerror(errno.ENOSPC if place == "no room" else errno.EIO), tmp_path)
