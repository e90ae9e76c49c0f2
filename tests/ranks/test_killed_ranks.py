"""Ranks that are killed, one or all, at any point of a commit continue from the same step, with the bits of a run that was not killed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from runs_of_ranks import KINDS, POINTS, Run, said_by

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

AT, LAST = 3, 6
CONTINUES = {"one has prepared": AT - 1, "the other has prepared": AT - 1}  # at all other points, from the step of the commit


class Trained:
    """A run, and what each rank has behind each step of the same training without disk."""

    def __init__(self, launcher, folder, model="shards", kind="in_forward", upto=LAST, **options):
        self.launcher, self.folder, self.count = launcher, folder, 0
        (folder / "disk").mkdir()
        self.run = Run(str(folder / "plain"), None, model, kind, upto, **options)
        self.digests = [{each["steps"]: each["digest"] for each in said} for said in said_by(launcher, self.run)]
        self.run = replace(self.run, disk=str(folder / "disk"))

    def said(self, **options):
        self.count += 1
        return said_by(self.launcher, replace(self.run, out=str(self.folder / str(self.count)), **options))

    def continues_from(self, steps, **options):
        for rank, said in enumerate(self.said(**options)):
            extra = [rank, steps] if steps % 2 or self.run.keep else None
            assert said[0] == {"steps": steps, "extra": extra, "digest": self.digests[rank][steps]}, f"rank {rank}"
            assert said[-1] == {"steps": LAST, "digest": self.digests[rank][LAST]}, f"rank {rank}"


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["shards", "stages"])
@pytest.mark.slow(
    but=("shards-in_forward-*", "shards-delayed-one writes*", "stages-in_forward-one has*", "stages-in_backward-one writes*")
)
def test_ranks_killed_in_a_commit_continue_from_one_step(model, kind, point, launcher, tmp_path):
    trained = Trained(launcher, tmp_path, model, kind)
    trained.said(point=point, at=AT)
    trained.continues_from(CONTINUES.get(point, AT))


@pytest.mark.parametrize("point", ["one has prepared", "one writes the next step"])
def test_ranks_killed_again_where_they_resume_lose_nothing(point, launcher, tmp_path):
    """One has a step that is to be put in place, or to be removed."""
    trained = Trained(launcher, tmp_path)
    trained.said(point=point, at=AT)
    assert [*map(len, trained.said(point="both settle"))] == [0, 0]
    trained.continues_from(CONTINUES.get(point, AT))


def test_a_step_that_one_rank_had_alone_is_not_taken_later(launcher, tmp_path):
    """Behind a second kill, when the other rank has prepared this step anew, and it has not."""
    trained = Trained(launcher, tmp_path)
    trained.said(point="one has prepared", at=AT)
    trained.said(point="the other has prepared", at=1)
    trained.continues_from(AT - 1)


@pytest.mark.parametrize(("point", "steps"), [("one has prepared a version", AT - 1), ("one has a version", AT)])
def test_ranks_killed_while_they_keep_a_step_have_the_same(point, steps, launcher, tmp_path):
    """It takes the place of one with the same name. The step itself is committed."""
    trained = Trained(launcher, tmp_path, keep="best")
    trained.said(point=point, at=AT)
    found = trained.said(version="best", upto=0)
    assert [(said[0]["steps"], said[0]["extra"]) for said in found] == [(steps, [rank, steps]) for rank in range(2)]
    assert [said[0]["digest"] for said in found] == [digests[steps] for digests in trained.digests]
    trained.continues_from(AT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["shards", "stages"])
def test_each_kill_of_a_rank_leaves_all_on_one_step(model, kind, launcher, tmp_path):
    """At random times of random ranks. At most two steps are made again, with `delay=1` three."""
    trained, times, made = Trained(launcher, tmp_path, model, kind, 150), random.Random(1), 0
    for _ in range(10):
        dies = (times.uniform(0.0, 0.6), times.randrange(2), times.choice((0.0, times.uniform(0.0, 0.3))))
        found = trained.said(dies=dies, upto=10**6, rate=8e7)
        steps = {said[0]["steps"] for said in found}
        assert len(steps) == 1 and (least := steps.pop()) >= made - (3 if kind == "delayed" else 2)
        for rank, said in enumerate(found):
            assert said[0]["digest"] == (trained.digests[rank][least] if least else None), f"rank {rank} behind {least} steps"
        made = max(said[-1]["steps"] for said in found)
