"""A run of which a rank is killed, resumed from its last checkpoint, ends with the bits of a run that was not."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from steps import OPTIONS
from test_checkpoints import everything
from test_mean import numbers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import RankError
from l2l_compile.ir import nodes
from l2l_compile.ranks import watch
from l2l_compile.runtime import executor
from models import Stack

STEPS, SAVED, KILLED = 6, 3, 4  # steps of the run, steps in its checkpoint, the step in which a rank is killed, from 0


def state_of(model, optimizer, rank: int) -> dict:
    """All that the next step depends on. Each rank draws its own numbers."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, f"random {rank}": torch.get_rng_state()}


def trains(rank: int, world: int, folder: str, how: str) -> dict[str, torch.Tensor]:
    """Train a model with each way to update; the losses of the steps, and all tensors at the end."""
    torch._dynamo.reset()
    found = {}
    for update in ("at_step", "in_backward", "in_forward"):
        torch.manual_seed(rank)
        model = l2l_compile.shard(Stack(2, dropout=0.3), init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        options = {**OPTIONS, "optimizer": optimizer, "update": update, "compile_update": False}
        step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
        checkpoint = f"{folder}/{update}"
        first = resume(model, optimizer, checkpoint, rank) if how == "resumed" else 0
        for number in range(first, STEPS):
            if how == "killed" and (rank, number, update) == (1, KILLED, "in_forward"):
                executor.HANDLERS[nodes.backward] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            loss = step(numbers(rank, number).float()).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[f"{update} loss {number}"] = loss.detach()
            if how == "killed" and number + 1 == SAVED:
                dcp.save(state_of(model, optimizer, rank), checkpoint_id=checkpoint)
        l2l_compile.synchronize(step)
        found |= {f"{update} {name}": value for name, value in everything(model, optimizer).items()}
    return found


def resume(model, optimizer, checkpoint: str, rank: int) -> int:
    """The number of steps that are done."""
    state = state_of(model, optimizer, rank)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state[f"random {rank}"])
    return SAVED


def is_killed(rank: int, world: int, folder: str) -> None:
    watch.PATIENCE = 1.0
    with pytest.raises(RankError, match="rank 1 does not answer"):
        trains(rank, world, folder, "killed")


def ends(rank: int, world: int, folder: str, how: str) -> dict[str, list]:
    return {name: value.tolist() for name, value in trains(rank, world, folder, how).items()}


@pytest.mark.slow
def test_a_run_with_a_killed_rank_is_resumed_with_the_same_bits(ranks, tmp_path):
    folder = str(tmp_path)
    ranks.run(is_killed, folder, killed=1)
    resumed = ranks.run(ends, folder, "resumed")
    whole = ranks.run(ends, folder, "whole")
    for ours, expected in zip(resumed, whole, strict=True):
        done = {name for name in expected if name.split(" loss ")[-1] in map(str, range(SAVED))}
        assert len(done) == 3 * SAVED and ours == {name: value for name, value in expected.items() if name not in done}
    last = f"at_step loss {STEPS - 1}"
    assert resumed[0][last] != resumed[1][last]
