"""Checkpoints of tensor parallel layers: what ranks that share layers save, others load, bit-equal, optimizer state included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_checkpoints import everything, take
from test_mean import numbers
from test_parallel_updates import shared_by
from test_tensor_parallel import Layers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile


def made(world, parts, update):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("dp", "tp"))
    model = Layers().double()
    optimizer, step = shared_by(mesh, model, "adamw", update=update, compile_update=False)
    return model, optimizer, step, mesh


def saves(rank, world, parts, folder, update):
    model, optimizer, step, mesh = made(world, parts, update)
    take(step, optimizer, [numbers(mesh.get_local_rank("dp"), number) for number in range(2)])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    before = everything(model, optimizer)
    if rank == 0:
        torch.save(before, f"{folder}/expected.pt")


def loads(rank, world, parts, folder, update):
    """What is loaded, and that training goes on from there."""
    model, optimizer, step, _ = made(world, parts, update)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected, found = torch.load(f"{folder}/expected.pt"), everything(model, optimizer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    take(step, optimizer, [numbers(0, 2)])  # the same rows on each rank
    l2l_compile.synchronize(step)
    return {name: value.tolist() for name, value in everything(model, optimizer).items()}


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.slow
def test_what_four_ranks_save_loads_on_four_and_two(ranks, tmp_path, update):
    """Saved on 2 x 2 ranks, loaded on 2 x 2, 1 x 2 and 2 x 1."""
    ranks.run(saves, 2, str(tmp_path), update, world=4)
    first, *others = ranks.run(loads, 2, str(tmp_path), update, world=4)
    assert all(other == first for other in others)
    for parts in (2, 1):
        ones = ranks.run(loads, parts, str(tmp_path), update)
        assert ones[0] == ones[1]
