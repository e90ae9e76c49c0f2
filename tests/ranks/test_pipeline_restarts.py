"""A rank is killed behind a checkpoint: all ranks start again, load it, and go on with the bits of a run that was never killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipelines import MODELS, Case, run
from test_pipeline_checkpoints import FLAT
from test_pipeline_failures import failing_in
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import RankError
from l2l_compile.ranks import watch

STEPS, SAVED = 6, 2  # of the whole run, and of those before the checkpoint
BATCHES = {"rows": (6,) * STEPS, "lengths": (7,) * STEPS}
CASES = {
    "backward": Case("llama", **BATCHES),
    "update": Case("u_shape", options={"update": "in_forward"}, **BATCHES),  # with dropout
    "in flight": Case("u_shape", loops=1, options={"schedule": "1f1b", "update": "in_forward", "delay": 1}, **BATCHES),
}
PLACES = {"in flight": "backward"}


def made(case: Case, world: int, seed: int = 0):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = l2l_compile.pipeline(MODELS[case.model](), init_device_mesh("cpu", (world,)), case.batch(0), loops=case.loops)
    return model, case.optimizer_of(model)


def state_of(model, optimizer) -> dict:
    """What a checkpoint has: the random numbers as well, which dropout takes."""
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": weights, "optimizer": state, "random": torch.get_rng_state()}


def save(case: Case, model, optimizer, folder: str, rank: int) -> None:
    """With delay=1, a file of each rank: it has the weights of both versions, which a new optimizer does not ask a DCP checkpoint for."""
    if "delay" in case.options:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, f"{folder}.{rank}")
    else:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load(case: Case, model, optimizer, folder: str, rank: int) -> None:
    if "delay" in case.options:
        state = torch.load(f"{folder}.{rank}", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    torch.set_rng_state(state["random"])


def never_killed(rank, world, place):
    trained = run(CASES[place], *made(CASES[place], world), steps=STEPS)
    return trained.losses[SAVED:], {name: t.numpy() for name, t in trained.weights.items()}


def killed(rank, world, place, folder):
    """The last rank is killed in a step behind the checkpoint."""
    case, mark = CASES[place], f"{folder}.killed"
    model, optimizer = made(case, world)
    run(case, model, optimizer, steps=SAVED)
    save(case, model, optimizer, folder, rank)
    if rank == world - 1:
        failing_in(PLACES.get(place, place), lambda: os.kill(os.getpid(), signal.SIGKILL), mark)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError):
        patch.setattr(watch, "PATIENCE", 2.0)
        run(case, model, optimizer, steps=STEPS - SAVED, first=SAVED)
    assert Path(mark).exists()


def started_again(rank, world, place, folder):
    model, optimizer = made(CASES[place], world, seed=7)  # with other weights, until it loads
    load(CASES[place], model, optimizer, folder, rank)
    trained = run(CASES[place], model, optimizer, steps=STEPS - SAVED, first=SAVED)
    return trained.losses, {name: t.numpy() for name, t in trained.weights.items()}


@pytest.mark.parametrize(
    ("place", "world"),
    [
        ("backward", 2),
        ("in flight", 3),
        pytest.param("update", 2, marks=pytest.mark.slow),
        pytest.param("backward", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_behind_a_kill_with_equal_bits(ranks, tmp_path, place, world):
    folder = str(tmp_path / "checkpoint")
    expected = ranks.run(never_killed, place, world=world, seconds=150)
    ranks.run(killed, place, folder, world=world, seconds=150, killed=world - 1)
    found = ranks.run(started_again, place, folder, world=world, seconds=150)
    for (losses, weights), (losses_of_all, weights_of_all) in zip(found, expected, strict=True):
        assert losses == losses_of_all and len(losses) == STEPS - SAVED
        assert weights.keys() == weights_of_all.keys()
        for name, weight in weights.items():
            numpy.testing.assert_array_equal(weight, weights_of_all[name], name, strict=True)
