"""A rank whose disk is full, fails or has too small a budget: its own error says why, and the others name the rank within seconds."""

from __future__ import annotations

import errno
import os
import time

import pytest
import torch
from test_stored_shards import MODES, mesh_of

from l2l_compile import L2LError, RankError
from slow_disk import Faults, slow_disk
from stored_training import training

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

SECONDS = 5.0
PLACES = {
    "no room": {"room": 4 << 20},  # bytes: the file is allocated before the first step
    "while parameters move": {"write_fails": (errno.EIO, 1 << 20)},
    "in the first step": {"write_fails": (errno.EIO, 7 << 20)},
    "in a later read": {"read_fails": (errno.EIO, 20 << 20)},
}
SAID = {"no room": os.strerror(errno.ENOSPC)}


def one_fails(rank, world, kind, faults, options, folder):
    """The error of each rank, and when it was raised. Rank 1 has the faults, and catches its error."""
    with slow_disk(Faults(**faults) if rank == 1 else Faults()):
        made = training("adamw", disk=folder, mesh=mesh_of(kind, world), **options)
        with pytest.raises(L2LError) as caught:
            made.step(7)
    return type(caught.value).__name__, str(caught.value), time.time()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "world"), [("shards", 2), ("replicas", 4)])
@pytest.mark.slow(but=("shards-2-no room-in_backward", "shards-2-in a later read-*", "replicas-4-while*-in_forward"))
def test_other_ranks_name_the_rank_whose_disk_fails(ranks, kind, world, place, mode, tmp_path):
    found = ranks.run(one_fails, kind, PLACES[place], MODES[mode], str(tmp_path), world=world, seconds=40)
    name, text, since = found.pop(1)
    said = f"{tmp_path}: {SAID.get(place, os.strerror(errno.EIO))} while "
    assert name == "DiskError" and text.startswith(said)
    for name, text, when in found:
        assert name == RankError.__name__ and text.startswith(f"rank 1 failed: l2l_compile.errors.DiskError: {said}")
        assert when - since < SECONDS
