"""A stage that is killed or fails: the other ranks end within seconds, with a sentence that names the rank and what they waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from pipelines import Case, train

from l2l_compile import RankError
from l2l_compile.ir import nodes
from l2l_compile.ranks import watch
from l2l_compile.runtime.executor import HANDLERS

SECONDS = 8.0
CASES = {
    "breadth_first": Case("llama", options={"update": "in_backward"}),
    "1f1b": Case("llama", loops=1, options={"update": "in_forward", "schedule": "1f1b"}),
    "without flush": Case("llama", loops=1, options={"update": "in_forward", "schedule": "1f1b", "delay": 1}),
}
PLACES = {"forward": nodes.forward, "backward": nodes.backward, "update": nodes.update}


def failing_in(place: str, fail, mark: str) -> None:
    """Rank 1 fails when it comes to this node the tenth time: in the second step at least. Writes down when."""
    runs, count = HANDLERS[PLACES[place]], 0

    def run(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 10:
            Path(mark).write_text(str(time.time()))
            fail()
        return runs(*args, **kwargs)

    HANDLERS[PLACES[place]] = run


def killed(rank, world, schedule, place, mark):
    if rank == 1:
        failing_in(place, lambda: os.kill(os.getpid(), signal.SIGKILL), mark)
        train(CASES[schedule], world)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError) as caught:
        patch.setattr(watch, "PATIENCE", 2.0)
        train(CASES[schedule], world)
    return str(caught.value), getattr(caught.value, "__notes__", []), time.time() - float(Path(mark).read_text())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", CASES)
def test_a_stage_that_is_killed_is_named(ranks, tmp_path, schedule, place):
    text, notes, seconds = ranks.run(killed, schedule, place, str(tmp_path / "failed"), world=2, killed=1)[0]
    assert seconds < SECONDS
    assert text.startswith("rank 1 does not answer since 2 s: it was killed, or hangs")
    if place != "update":  # it may be noticed where ranks announce the next forward
        assert any("this rank, 0, waited for '" in note and "from rank 1" in note for note in notes), notes


def raising(rank, world, schedule, place, mark):
    before = dict(HANDLERS)

    def fail():
        raise ValueError("no more data")

    try:
        if rank == 1:
            failing_in(place, fail, mark)
        with pytest.raises((ValueError, RankError)) as caught:
            train(CASES[schedule], world)
        assert time.time() - float(Path(mark).read_text()) < SECONDS
        return str(caught.value)
    finally:
        HANDLERS.clear()
        HANDLERS.update(before)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("schedule", CASES)
def test_an_error_of_a_stage_is_told_to_the_others(ranks, tmp_path, schedule, place):
    told, own = ranks.run(raising, schedule, place, str(tmp_path / "failed"), world=2)
    assert own == "no more data" and told.startswith("rank 1 failed: ValueError: no more data")
