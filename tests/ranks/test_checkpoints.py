"""`torch.distributed.checkpoint`: what some ranks save, another number of ranks loads, bit-equal, optimizer state included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from steps import OPTIONS, whole
from test_mean import Odd, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile


def made(world, update, optimizer):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Odd()
    if world > 1:
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    chosen = optimizer([p for p in model.parameters() if p.requires_grad])
    step = torch.compile(
        model, backend="l2l", fullgraph=True, options={**OPTIONS, "optimizer": chosen, "update": update, "compile_update": False}
    )
    return model, chosen, step


def take(step, optimizer, batches) -> None:
    for batch in batches:
        step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, whole."""
    found = {f"p {name}": p for name, p in whole(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in found.items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def saves(rank, world, folder, update):
    model, optimizer, step = made(world, update, adamw)
    take(step, optimizer, [tokens(rank, number, 11) for number in range(2)])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    before = everything(model, optimizer)
    if rank == 0:
        torch.save(before, f"{folder}/expected.pt")


def loads(rank, world, folder, update):
    """What is loaded, and that training goes on from there."""
    model, optimizer, step = made(world, update, adamw)
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
    take(step, optimizer, [tokens(0, 2, 11)])  # the same rows on each rank: as one rank with them
    l2l_compile.synchronize(step)
    return {name: value.tolist() for name, value in everything(model, optimizer).items()}


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.slow(but="in_forward")
def test_what_four_ranks_save_loads_on_three_two_and_one(ranks, tmp_path, update):
    folder = str(tmp_path / "checkpoint")
    ranks.run(saves, folder, update, world=4)
    ended = [ranks.run(loads, folder, update, world=world)[0] for world in (3, 2, 1)]
    for other in ended[1:]:
        assert other.keys() == ended[0].keys()
        for name, value in ended[0].items():
            torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-5, atol=1e-7, msg=name)
