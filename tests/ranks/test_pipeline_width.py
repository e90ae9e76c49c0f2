"""Each stage of a pipeline is sharded among ranks of its own, or copied: a mesh of width x depth, whose rows have different batches."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch
from pipelines import MODELS, Case, run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import l2l_compile
from l2l_compile import L2LError, RankError
from l2l_compile.ir import nodes
from l2l_compile.ranks import watch
from l2l_compile.runtime.executor import HANDLERS

STEPS = 4


@dataclasses.dataclass(frozen=True)
class OfWidth(Case):
    """The batches of one of the pipelines."""

    row: int = 0

    def batch(self, step):
        made = super().batch(step)
        return {name: value[self.row :: 2].contiguous() for name, value in made.items()}


def case_of(row: int, *arguments, **more) -> Case:
    return OfWidth(*arguments, row=row, **more)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def train(case: Case, mesh: DeviceMesh, width, depth: DeviceMesh | None):
    """Train the stages of a pipeline along `depth`, each of which is sharded along `width`; without `depth`, the whole model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    if depth is not None:
        l2l_compile.pipeline(model, depth, case.batch(0), loops=case.loops)
    l2l_compile.shard(model, width)
    trained = run(case, model, case.optimizer_of(model))
    return dataclasses.replace(trained, gradients=whole(trained.gradients), weights=whole(trained.weights))


def mesh_of(kind: str):
    """A mesh of 2 x 2 ranks, its width and its depth."""
    if kind == "shards":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        return mesh, mesh["dp"], mesh["pp"]
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "pp"))
    return mesh, mesh["replicate", "shard"], mesh["pp"]


def assert_equal(found, expected, tolerance: float | None) -> None:
    """Equal bits; with a tolerance, numbers that are that close."""
    if tolerance is None:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def equal_to_shard(rank, world, kind, tolerance, *cases):
    """A pipeline over a sharded model has the numbers of the sharded model."""
    mesh, width, depth = mesh_of(kind)
    alone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("alone", "copies"))["alone"]
    for arguments, more in cases:
        case = case_of(mesh.get_local_rank(0), *arguments, **more)
        sharded, staged = train(case, mesh, alone, None), train(case, mesh, width, depth)
        assert_equal(torch.tensor(staged.losses), torch.tensor(sharded.losses), tolerance)
        assert set(staged.weights) < set(sharded.weights)
        for made, expected in ((staged.gradients, sharded.gradients), (staged.weights, sharded.weights)):
            for name, tensor in made.items():
                assert_equal(tensor, expected[name], tolerance)
        assert staged.programs == sharded.programs


def case(*arguments, **more):
    return arguments, more


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_sharded_pipeline_has_the_bits_of_shards(ranks, kind):
    of_layers = case("u_shape", torch.float64, loops=1, options={"update": "in_backward"})
    ranks.run(equal_to_shard, kind, None, case("llama"), of_layers, world=4, seconds=240)


@pytest.mark.parametrize("model", ["gated", "convolved", "mixtral", "gpt2", "bert", "t5"])
@pytest.mark.slow
def test_models_have_the_bits_of_shards(ranks, model):
    ranks.run(equal_to_shard, "shards", None, case(model), case(model, loops=1), world=4, seconds=240)


OPTIONS = {
    "in_forward": {"update": "in_forward"},
    "delay": {"update": "in_forward", "delay": 1},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "checks": {"check": True},
    "compiled": {"block_compiler": "inductor"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.slow
def test_options_have_the_bits_of_shards(ranks, options):
    rounds = "precision" in options  # the mean of two gradients in 16 bits; a sharded gradient is rounded once, behind the mean
    for kind in ("shards", "replicas")[: 1 if rounds else 2]:
        ranks.run(equal_to_shard, kind, None, case("llama", options=options), world=4, seconds=240)


def test_clipping_takes_the_norm_over_all_ranks(ranks):
    """The norm is a sum over shards, in another order."""
    in_forward = {"update": "in_forward", "max_grad_norm": 0.1}
    cases = case("llama", torch.float64, max_norm=0.1), case("u_shape", torch.float64, options=in_forward)
    ranks.run(equal_to_shard, "shards", 1e-12, *cases, world=4, seconds=240)


def equal_to_eager(rank, world, kind):
    """The mean of the losses of both pipelines, trained in eager."""
    mesh, width, depth = mesh_of(kind)
    found = train(case_of(mesh.get_local_rank(0), "llama", torch.float64), mesh, width, depth)
    torch.manual_seed(0)
    model = MODELS["llama"]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        losses = [model(**case_of(row, "llama", torch.float64).batch(step)).loss for row in range(2)]
        (sum(losses) / 2).backward()
        torch.testing.assert_close(found.losses[step], losses[mesh.get_local_rank(0)].item(), rtol=1e-10, atol=1e-10)
        if step == 0:
            for name, gradient in found.gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-10)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_width_and_depth_have_the_numbers_of_eager(ranks, kind):
    ranks.run(equal_to_eager, kind, world=4, seconds=240)


def killed_in_backward(rank, world):
    mesh, width, depth = mesh_of("shards")
    if rank == world - 1:
        HANDLERS[nodes.backward] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        train(case_of(1, "llama"), mesh, width, depth)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError) as caught:
        patch.setattr(watch, "PATIENCE", 2.0)
        train(case_of(mesh.get_local_rank(0), "llama"), mesh, width, depth)
    return str(caught.value)


def test_all_ranks_name_the_one_that_is_killed(ranks):
    """Rank 0 exchanges nothing with rank 3, neither in its stage nor in its pipeline."""
    for text in ranks.run(killed_in_backward, world=4, killed=3)[:3]:
        assert text.startswith("rank 3 does not answer since 2 s"), text


def refusals(rank, world):
    """What ranks are told that have another batch, other options, or another mesh."""
    mesh, width, depth = mesh_of("shards")
    row = mesh.get_local_rank(0)
    found = []

    def refused(kind, act):
        with pytest.raises(kind) as caught:
            act()
        found.append(str(caught.value))

    of_each = case_of(rank % 2, "llama")
    refused(L2LError, lambda: train(of_each, mesh, width, depth))
    train(case_of(row, "llama", options={"micro_batches": 2 + row}), mesh, width, depth)  # each pipeline may have another number
    refused(L2LError, lambda: train(case_of(row, "llama", options={"batch_scope": "global"}), mesh, width, depth))
    torch._dynamo.reset()
    model = MODELS["llama"]()
    refused(L2LError, lambda: l2l_compile.shard(l2l_compile.pipeline(model, depth, case_of(row, "llama").batch(0)), mesh))
    sharded = l2l_compile.shard(MODELS["llama"](), init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))["one"])
    refused(L2LError, lambda: l2l_compile.pipeline(sharded, depth, case_of(row, "llama").batch(0)))
    refused(RankError, lambda: train(case_of(row, "llama", options={"prefetch": int(rank != 3)}), mesh, width, depth))
    return found


def test_what_width_and_depth_refuse(ranks):
    for rank, (batch, scope, mesh, sharded, prefetch) in enumerate(ranks.run(refusals, world=4, seconds=200)):
        assert "ranks 0 and 1 are stages of a pipeline and have other inputs than each other" in batch, rank
        assert "batch_scope='global'" in scope
        assert "are stages of one pipeline" in mesh
        assert "is sharded over ranks already" in sharded
        assert "ranks 1 and 3 run the same stage, and their programs have other collectives" in prefetch
