"""A mesh ("replicate", "shard"): each replica shards the model, and the gradients of a shard are averaged over the replicas."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from steps import OPTIONS, assert_same, mean_of_eager, whole
from test_checkpoints import adamw, everything, loads, take
from test_mean import Odd, numbers, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError
from models import Stack

FLOOR = 1e-10  # in float64
KINDS = {
    "stack": (lambda: Stack(3).double(), numbers, lambda model, batch: model(batch).pow(2).mean()),
    "odd": (lambda: Odd().double(), lambda rank, step: tokens(rank, step, 11), lambda model, batch: model(batch)),
}
UPDATES = {
    "at_step": {},
    "in_backward": {"update": "in_backward", "compile_update": False},
    "in_forward": {"update": "in_forward", "compile_update": False, "max_grad_norm": 0.05},
}


def mesh_of(replicas: int, shards: int):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def trains_as_eager_on_all_batches(rank, world, kind, update):
    """Gradients, norms, and parameters after two steps; with in_forward, gradients are clipped."""
    torch.manual_seed(0)
    build, batch, loss = KINDS[kind]
    model = build()
    eager, options = copy.deepcopy(model), UPDATES[update]
    l2l_compile.shard(model, mesh_of(2, 2))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager))
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, "optimizer": ours, **options})
    seen = []
    for number in range(2):
        loss(step, batch(rank, number)).backward()
        mean = mean_of_eager(eager, [lambda m, r=r, number=number: loss(m, batch(r, number)) for r in range(world)])
        if update == "at_step":
            assert_same(whole(model, gradients=True), mean, FLOOR)
        for name, parameter in eager.named_parameters():
            parameter.grad = mean.get(name)
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), options.get("max_grad_norm", float("inf")))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        l2l_compile.synchronize(step)
        seen.append(l2l_compile.stats(step).gradient_norm)
        assert abs(seen[-1] - norm) <= FLOOR * norm
    assert_same(whole(model), {name: p.detach() for name, p in eager.named_parameters()}, FLOOR)
    return seen, {name: p.tolist() for name, p in whole(model).items()}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but=("odd-in_backward", "stack-in_forward"))
def test_two_replicas_of_two_ranks_train_as_eager_on_all_batches(ranks, kind, update):
    first, *others = ranks.run(trains_as_eager_on_all_batches, kind, update, world=4)
    assert all(other == first for other in others)  # the same bits everywhere


def draws_as_four_ranks(rank, world):
    """Masks of dropout differ between replicas, as they do between ranks."""
    found = []
    for mesh in (init_device_mesh("cpu", (world,)), mesh_of(2, 2)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
        model = l2l_compile.shard(nn.Sequential(*layers).double(), mesh)
        step = torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)
        step(numbers(0, 0)).pow(2).mean().backward()
        found.append(whole(model, gradients=True))
    assert_same(*found, 1e-12)


def test_replicas_draw_as_ranks_of_one_dimension(ranks):
    ranks.run(draws_as_four_ranks, world=4)


def clips_as_one_process(rank, world):
    """`clip_grad_norm_` of PyTorch counts each shard once."""
    torch.manual_seed(0)
    model, x = Stack(3).double(), numbers(0, 0)
    eager = copy.deepcopy(model)
    l2l_compile.shard(model, mesh_of(2, 2))
    torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)(x).pow(2).mean().backward()
    eager(x).pow(2).mean().backward()
    ours, theirs = (torch.nn.utils.clip_grad_norm_(m.parameters(), 0.02) for m in (model, eager))
    assert abs(ours.full_tensor() - theirs) <= 1e-12 * theirs
    assert_same(whole(model, gradients=True), {name: p.grad for name, p in eager.named_parameters()}, FLOOR)


def test_clipping_counts_a_shard_once(ranks):
    ranks.run(clips_as_one_process, world=4)


def saves(rank, world, folder):
    torch.manual_seed(0)
    model = l2l_compile.shard(Odd(), mesh_of(2, 2))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    options = {**OPTIONS, "optimizer": optimizer, "update": "in_forward", "compile_update": False}
    take(torch.compile(model, backend="l2l", fullgraph=True, options=options), optimizer, [tokens(rank, n, 11) for n in range(2)])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = everything(model, optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")


def test_a_checkpoint_of_replicas_loads_on_two_ranks(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    ranks.run(saves, folder, world=4)
    ranks.run(loads, folder, "in_forward", world=2)


def refuses(rank, world):
    with pytest.raises(l2l_compile.L2LError, match=r"replicate.* repeats the model and shards nothing"):
        l2l_compile.shard(Stack(2), mesh_of(4, 1))
    model = l2l_compile.shard(Stack(2), mesh_of(2, 2))
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, "batch_scope": "global"})
    with pytest.raises(
        l2l_compile.L2LError, match=r"batch_scope='global' is one batch of all ranks, and .*replicate.* has 2 replicas"
    ):
        step(numbers(rank, 0).float())


def test_replicas_of_one_batch_are_refused(ranks):
    ranks.run(refuses, world=4)


def a_dimension_without_a_meaning_is_refused(rank, world):
    for names in (("dp", "fsdp"), ("shard", "replicate"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(
            L2LError, match=rf"dimensions \('{names[0]}', '{names[1]}'\), and no layer .* name them \('replicate', 'shard'\)"
        ):
            l2l_compile.shard(Stack(2), mesh)
    with pytest.raises(L2LError, match="takes a DeviceMesh, as init_device_mesh.* makes it, got 2"):
        l2l_compile.shard(Stack(2), 2)


def test_a_dimension_without_a_meaning_is_refused(ranks):
    ranks.run(a_dimension_without_a_meaning_is_refused, world=4)
