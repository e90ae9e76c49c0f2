"""Ranks that are killed, one or all, at any point of a commit continue from the same step, with the bits of a run that was not killed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runs_of_ranks import KINDS, POINTS, Run, said_by

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

AT, LAST = 3, 6
CONTINUES = {"one has prepared": AT - 1, "the other has prepared": AT - 1}  # at all other points, from the step of the commit


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["shards", "stages"])
@pytest.mark.slow(
    but=("shards-in_forward-*", "shards-delayed-one writes*", "stages-in_forward-one has*", "stages-in_backward-one writes*")
)
def test_ranks_killed_in_a_commit_continue_from_one_step(model, kind, point, launcher, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    run = Run(str(tmp_path / "plain"), None, model, kind, LAST)
    plain = said_by(launcher, run)
    run = replace(run, disk=str(disk))
    said_by(launcher, replace(run, out=str(tmp_path / "killed"), point=point, at=AT))
    for rank, said in enumerate(said_by(launcher, replace(run, out=str(tmp_path / "again")))):
        steps = CONTINUES.get(point, AT)
        digests = {each["steps"]: each["digest"] for each in plain[rank]}
        wanted = [steps, [rank, steps] if steps % 2 else None, digests[steps]]
        assert [said[0][name] for name in ("steps", "extra", "digest")] == wanted, f"rank {rank}"
        assert said[1]["steps"] == LAST and said[1]["digest"] == digests[LAST], f"rank {rank}"
