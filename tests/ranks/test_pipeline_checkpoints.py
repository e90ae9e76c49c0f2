"""`torch.distributed.checkpoint`: what the stages of a pipeline save, any other number of ranks loads, bit-equal, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipelines import MODELS, Case, run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile

CASE = Case("llama")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def made(world: int, how: str, case: Case = CASE):
    """A model on one rank, on the stages of a pipeline, sharded, or on two stages that are sharded; and its optimizer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]()
    if how == "pipeline":
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), case.batch(0))
    elif how == "shard":
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    elif how == "grid":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
        l2l_compile.shard(l2l_compile.pipeline(model, mesh["pp"], case.batch(0)), mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saves(rank, world, how, folder):
    model, optimizer = made(world, how)
    run(CASE, model, optimizer, steps=2)
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return None


def loads(rank, world, how, folder):
    """Two more steps after loading. Returns the losses and this rank's weights."""
    model, optimizer = made(world, how)
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
    trained = run(CASE, model, optimizer, steps=2)
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in trained.weights.items()}
    return trained.losses, {name: t.numpy() for name, t in whole.items()}


def resumed(ranks, folder, before, after):
    """Losses and weights of a run that was saved in one way and loaded in another."""
    (how, world), (then, count) = before, after
    ranks.run(saves, how, folder, world=world, seconds=150)
    found = ranks.run(loads, then, folder, world=count, seconds=150)
    weights = {name: weight for _, mine in found for name, weight in mine.items()}
    assert all(losses == found[0][0] for losses, _ in found) or then == "shard"
    return found[0][0], {name: torch.from_numpy(weight) for name, weight in weights.items()}


ALONE = ("one", 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("pipeline", 2), ALONE),
        (ALONE, ("pipeline", 2)),
        pytest.param(("pipeline", 4), ("pipeline", 2), marks=pytest.mark.slow),
        pytest.param(("grid", 4), ALONE, marks=pytest.mark.slow),
        pytest.param(("pipeline", 2), ("grid", 4), marks=pytest.mark.slow),
    ],
    ids=["two to one", "one to two", "four to two", "sharded to one", "two to sharded"],
)
def test_another_number_of_stages_goes_on_with_equal_bits(ranks, tmp_path, before, after):
    expected = resumed(ranks, str(tmp_path / "alone"), ALONE, ALONE)
    losses, weights = resumed(ranks, str(tmp_path / "staged"), before, after)
    assert losses == expected[0]
    assert weights.keys() == expected[1].keys()
    assert all(torch.equal(weight, expected[1][name]) for name, weight in weights.items())


@pytest.mark.slow
def test_sharded_ranks_load_what_stages_save(ranks, tmp_path):
    _, expected = resumed(ranks, str(tmp_path / "alone"), ALONE, ALONE)
    _, weights = resumed(ranks, str(tmp_path / "staged"), ("pipeline", 4), ("shard", 2))
    assert all((weight - expected[name]).norm() <= 1e-4 * weight.norm() + 1e-6 for name, weight in weights.items())
