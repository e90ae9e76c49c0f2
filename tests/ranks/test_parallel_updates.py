"""The three values of `update` on tensor parallel layers: each rank updates its parts, with the numbers of the model that is not sharded."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from steps import OPTIONS, assert_same, mean_of_eager, whole
from test_mean import FLOOR, numbers
from test_tensor_parallel import Layers, parallel_layers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError

STEPS = 3
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
}
WAYS = [
    ("in_backward", {}),
    ("at_step", {}),
    ("in_forward", {"max_grad_norm": 0.01}),
    ("in_forward", {"max_grad_norm": 0.01, "compile_update": False}),
]


def shared_by(mesh, model, optimizer, **options):
    """The model with parallel layers, sharded over the mesh; its optimizer, and the model compiled."""
    parallel_layers(model, mesh["tp"])
    l2l_compile.shard(model, mesh)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return chosen, torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, "optimizer": chosen, **options})


def equals_the_whole_model(rank, world, optimizer):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    start = Layers().double()
    for update, options in WAYS:
        torch._dynamo.reset()
        plain, model = copy.deepcopy(start), copy.deepcopy(start)
        theirs = OPTIMIZERS[optimizer](plain.parameters())
        ours, step = shared_by(mesh, model, optimizer, update=update, **options)
        for number in range(STEPS):
            expected = mean_of_eager(plain, [lambda m, r=r, n=number: m(numbers(r, n)) for r in range(mesh.size(0))])
            for name, parameter in plain.named_parameters():
                parameter.grad = expected[name]
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), options.get("max_grad_norm", 1e9))
            theirs.step()
            step(numbers(mesh.get_local_rank("dp"), number)).backward()
            ours.step()
            ours.zero_grad()
            assert abs(l2l_compile.stats(step).gradient_norm - norm) <= 1e-12 * norm, (update, number)
        l2l_compile.synchronize(step)
        assert_same(whole(model), {n: p.detach() for n, p in plain.named_parameters()}, FLOOR)
        state = get_optimizer_state_dict(model, ours, options=StateDictOptions(full_state_dict=True))["state"]
        if rank == 0:
            for index, (name, _) in enumerate(plain.named_parameters()):
                for key, value in theirs.state_dict()["state"][index].items():
                    assert state[name][key].shape == value.shape, (update, name, key)
                    torch.testing.assert_close(state[name][key], value, rtol=FLOOR, atol=1e-15)


@pytest.mark.parametrize(("optimizer", "world"), [("adamw", 2), ("adamw", 4), ("sgd", 2)])
@pytest.mark.slow(but="adamw-2")
def test_all_updates_have_the_numbers_of_the_unsharded_model(ranks, optimizer, world):
    ranks.run(equals_the_whole_model, optimizer, world=world)


def skips_alike(rank, world, precision, large):
    """The gradient of a part that one rank has overflows; the loss and the other gradients are finite."""
    torch.manual_seed(0)
    model = Layers() if precision == "fp16" else Layers().double()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    optimizer, step = shared_by(mesh, model, "sgd", update="in_forward", precision=precision)
    optimizer.param_groups[0]["l2l_loss_scale"] = (1024.0, 0)  # as one that was loaded: the first one overflows on both ranks
    if rank == 1:
        layer = model.layers[1]
        with torch.no_grad():
            layer.up._parameters["weight"].to_local()[:, 0] = large
            layer.down._parameters["weight"].to_local().zero_()
    before = copy.deepcopy(whole(model))
    loss = step(numbers(0, 0).to(model.head.weight.dtype))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss.backward()
        optimizer.step()
        l2l_compile.synchronize(step)
    assert loss.isfinite() and (precision == "fp16" or any("updates nothing" in str(w.message) for w in seen))
    assert_same(whole(model), before, 0)
    stats = l2l_compile.stats(step)
    return stats.skipped_steps, stats.loss_scale


@pytest.mark.parametrize(("precision", "large"), [("fp32", 1e200), ("fp16", 2e4)])
def test_a_part_that_overflows_has_the_step_skipped_by_all(ranks, precision, large):
    first, second = ranks.run(skips_alike, precision, large)
    assert first == second and first[0] == 1


def late_updates(rank, world):
    """With `delay`, as one process that has the same rows."""
    torch.manual_seed(0)
    start = Layers().double()
    ways = {"update": "in_forward", "delay": 1, "max_grad_norm": 0.01, "compile_update": False}
    found = []
    for shared in (False, True):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        if shared:
            mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
            optimizer, step = shared_by(mesh, model, "sgd", **ways)
        else:
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **ways, "optimizer": optimizer})
        for number in range(STEPS):
            step(numbers(0, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        l2l_compile.synchronize(step)
        found.append(whole(model))
    assert_same(found[1], found[0], FLOOR)


def test_updates_may_be_late(ranks):
    ranks.run(late_updates)


class Masked(Layers):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.head(x).pow(2).mean()


def masks_are_those_of_one_process(rank, world):
    torch.manual_seed(0)
    model = Masked().double()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _, step = shared_by(mesh, model, "sgd")
    batches = [numbers(1, r) for r in range(mesh.size(0))]  # of four rows
    torch.manual_seed(1)
    loss = step(batches[mesh.get_local_rank("dp")]).detach()
    torch._dynamo.reset()
    torch.manual_seed(1)
    options = {**OPTIONS, "micro_batches": 2 * mesh.size(0)}
    expected = torch.compile(alone, backend="l2l", options=options)(torch.cat(batches))
    total = loss.clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total / world, expected.detach(), rtol=1e-12, atol=0)
    return loss.item()


@pytest.mark.slow
def test_ranks_that_share_layers_draw_alike(ranks):
    a, b, c, d = ranks.run(masks_are_those_of_one_process, world=4)
    assert a == b != c == d


def with_or_without_shard(world, model, with_shard):
    """A model whose layers all ranks share, compiled."""
    if with_shard:
        return shared_by(init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp")), model, "sgd")[1]
    parallel_layers(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    return torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)


def seeds_of_their_own(rank, world):
    """Every rank has a seed of its own: masks are those of the first."""
    torch.manual_seed(0)
    step = with_or_without_shard(world, Masked().double(), False)
    torch.manual_seed(rank)
    return [step(numbers(0, 0)).item() for _ in range(2)]


def test_ranks_that_share_layers_draw_alike_without_shard(ranks):
    first, second = ranks.run(seeds_of_their_own)
    assert first == second and first[0] != first[1]


def another_batch_is_refused(rank, world, with_shard):
    step = with_or_without_shard(world, Layers().double(), with_shard)
    with pytest.raises(L2LError, match="ranks 0 and 1 share parallel layers and have batches of 4 and 3 rows"):
        step(numbers(1 - rank, 0))


@pytest.mark.parametrize("with_shard", [True, False])
def test_ranks_that_share_layers_have_the_same_rows(ranks, with_shard):
    ranks.run(another_batch_is_refused, with_shard)


def other_rows_are_refused(rank, world, with_shard):
    step = with_or_without_shard(world, Layers().double(), with_shard)
    step(numbers(0, 0)).backward()
    with pytest.raises(L2LError, match="ranks 0 and 1 share parallel layers and have other inputs than each other"):
        step(numbers(0, rank))


@pytest.mark.parametrize("with_shard", [True, False])
def test_ranks_that_share_layers_have_one_batch_and_not_two(ranks, with_shard):
    ranks.run(other_rows_are_refused, with_shard)


def another_path_is_an_error(rank, world, with_shard):
    step = with_or_without_shard(world, Layers().double(), with_shard)
    step(numbers(0, 0)).backward()
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(L2LError, match="rank 0: begins forward 2, to train.*\n.*rank 1: .*without"),
    ):
        step(numbers(0, 0))


@pytest.mark.parametrize("with_shard", [True, False])
def test_ranks_that_share_layers_take_the_same_path(ranks, with_shard):
    ranks.run(another_path_is_an_error, with_shard)


def a_step_that_one_skips(rank, world):
    model = Layers().double()
    step = with_or_without_shard(world, model, False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step(numbers(0, 0)).backward()
    if rank == 0:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    with pytest.raises(L2LError, match="rank 0: begins forward 2, to train, after 1 .*\n.*rank 1: .*after 0"):
        step(numbers(0, 0))


def test_ranks_that_share_layers_step_together_without_shard(ranks):
    ranks.run(a_step_that_one_skips)


class RowsAlone(torch.optim.Optimizer):
    """A step on each row by its norm: right on rows, wrong on columns."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-9)


def an_optimizer_of_rows_is_refused(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = Layers()
    parallel_layers(model, mesh["tp"])
    l2l_compile.shard(model, mesh)
    options = {**OPTIONS, "optimizer": RowsAlone(model.parameters()), "update": "in_forward"}
    with pytest.raises(L2LError, match="RowsAlone looks at a parameter as a whole"):
        torch.compile(model, backend="l2l", fullgraph=True, options=options)(numbers(0, 0).float())


def test_an_optimizer_that_needs_whole_rows_is_refused(ranks):
    ranks.run(an_optimizer_of_rows_is_refused)
