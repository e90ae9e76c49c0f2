"""Ranks would not commit the same step: a run that can be resumed is one of a single rank."""

from __future__ import annotations

import pytest
import torch

import l2l_compile
from l2l_compile import L2LError
from stored_training import training


def is_refused(rank, world, folder):
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    made = training("adamw", disk=f"{folder}/{rank}", mesh=mesh, update="in_forward", resumable=True)
    with pytest.raises(L2LError, match="'resumable' is for one rank: .* torch.distributed.checkpoint"):
        l2l_compile.resume(made.call)


def test_a_resumable_run_of_several_ranks_is_refused(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    ranks.run(is_refused, str(tmp_path))
