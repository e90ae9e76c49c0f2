"""What tests of several ranks share: a sharded model beside an eager copy, and their gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile

OPTIONS = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}


def sharded(model: nn.Module, world: int, **options) -> tuple[nn.Module, nn.Module, nn.Module]:
    """An eager copy, the model sharded over all ranks, and the model compiled."""
    eager = copy.deepcopy(model)
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    return eager, model, torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **options})


def whole(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The parameters, or their gradients, gathered; to be called by all ranks."""
    tensors = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items() if t is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Tensors by name, norm-wise."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        error = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: {error:.2e}"


def mean_of_eager(eager: nn.Module, losses) -> dict[str, torch.Tensor]:
    """The mean of eager's gradients of several losses, each by itself."""
    total: dict[str, torch.Tensor] = {}
    count = 0
    for loss in losses:
        eager.zero_grad()
        loss(eager).backward()
        count += 1
        for name, p in eager.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad
    return {name: gradient / count for name, gradient in total.items()}
