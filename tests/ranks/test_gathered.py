"""What a user does with `module.weight` of a sharded model, outside of its forward: reading is right, and a lost write is an error."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from steps import OPTIONS, whole
from test_mean import Odd, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError

WRITES = {
    "init": lambda layer: nn.init.normal_(layer.weight),
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "in place": lambda layer: layer.bias.zero_(),
    "an operator": lambda layer: operator.iadd(layer.weight.data, 1),
    "into data": lambda layer: layer.weight.data.mul_(2),
    "other data": lambda layer: setattr(layer.weight, "data", torch.zeros(5, 4)),
    "an entry": lambda layer: layer.weight.__setitem__(0, 1.0),
    "a view": lambda layer: layer.weight.t()[0].fill_(1.0),
    "one of several": lambda layer: layer.weight.unbind()[0].fill_(1.0),
    "a list": lambda layer: torch._foreach_add_([layer.weight], 1.0),
    "out": lambda layer: torch.add(torch.ones(5, 4), 1.0, out=layer.weight),
    "a function": lambda layer: nn.functional.relu(layer.weight, inplace=True),
    "requires_grad_": lambda layer: layer.weight.requires_grad_(False),
    "requires_grad": lambda layer: setattr(layer.weight, "requires_grad", False),
    "a gradient": lambda layer: setattr(layer.weight, "grad", torch.zeros(5, 4)),
}


def two_layers(world: int) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    plain = copy.deepcopy(model)
    return l2l_compile.shard(model, init_device_mesh("cpu", (world,))), plain


def writes_are_errors(rank, world):
    model, plain = two_layers(world)
    for name, write in WRITES.items():
        with torch.no_grad(), pytest.raises(L2LError, match="the '(weight|bias)' of a Linear is a copy, gathered from all ranks"):
            write(model[0])
            raise AssertionError(name)
    for name, value in whole(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    with torch.no_grad():
        dict(model.named_parameters())["0.weight"].fill_(2.0)
    assert bool((model[0].weight == 2).all())


def test_writes_that_would_be_lost_are_errors(ranks):
    ranks.run(writes_are_errors)


def reads_are_those_of_the_plain_model(rank, world, folder):
    model, plain = two_layers(world)
    ours, theirs = model[0].weight, plain[0].weight
    assert torch.equal(ours, theirs) and ours.shape == torch.Size([5, 4]) and type(ours + 0) is torch.Tensor
    ours.detach().clone().zero_()
    torch.zeros(5, 4).copy_(ours.detach())
    with torch.no_grad():
        copied = copy.deepcopy(model[0].weight)
        torch.save(model[0].weight, f"{folder}/{rank}.pt")
    assert type(copied) is type(torch.load(f"{folder}/{rank}.pt")) is torch.Tensor
    x = torch.randn(3, 4, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().mean().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), plain[0].weight.grad)


def test_reads_are_those_of_the_plain_model(ranks, tmp_path):
    ranks.run(reads_are_those_of_the_plain_model, str(tmp_path))


def whole_tensors_are_loaded(rank, world, on_meta):
    torch.manual_seed(5)
    expected = Odd().state_dict()
    with torch.device("meta" if on_meta else "cpu"):
        model = Odd()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    step = torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)
    if on_meta:
        with pytest.raises(L2LError, match="parameter '.*' is on meta, without values: give the model memory with"):
            step(tokens(0, 0, 11))
        model.to_empty(device="cpu")
    else:
        step(tokens(0, 0, 11)).backward()
    model.load_state_dict(expected)
    assert whole(model).keys() <= expected.keys()
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name
    plain = Odd()
    plain.load_state_dict(expected)
    torch.testing.assert_close(step(tokens(0, 0, 11)), plain(tokens(0, 0, 11)), rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({name: torch.zeros(1, 2, 3) for name in expected})


@pytest.mark.parametrize("on_meta", [False, True], ids=["host", "meta"])
def test_a_state_dict_of_whole_tensors_is_loaded_by_rows(ranks, on_meta):
    ranks.run(whole_tensors_are_loaded, on_meta)
