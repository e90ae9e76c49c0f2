"""Twelve small models, each trained on the CUDA device as on the CPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import l2l_compile
import models
from training_loop import UPDATES, Transformer

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from gpu_stages import zoo as benchmark_models  # the models that gpu.py compares on a GPU

STEPS, ROWS = 3, 7

Batch = dict[str, torch.Tensor] | torch.Tensor


def _rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda seed: torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (ROWS, 32), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "transformer": (Transformer, _tokens),
    "stack": (models.Stack, _rows(5)),
    "encoder and decoder": (models.EncoderDecoder, _rows(6, models.WIDTH)),
    "bias of the first": (models.BiasOfFirst, _rows(6, models.WIDTH)),
    "shared weights": (models.Shared, _rows(5)),
    "skips": (models.UNet, _rows(models.WIDTH)),
    "no two layers alike": (models.Funnel, _rows(5)),
    **{spec.name: (spec.make, spec.batch) for spec in benchmark_models.SPECS},
}


def trained(call: Callable, batches: list[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
    """Train a compiled model. Returns the losses."""
    losses = []
    for batch in batches:
        loss = models.loss_of(call(**batch) if isinstance(batch, dict) else call(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    l2l_compile.synchronize(call)
    return [float(loss) for loss in losses]


def difference(name: str, update: str, dtype: torch.dtype, **options: object) -> float:
    """The largest difference of losses, parameters and buffers to the same training on the CPU, relative to a tensor's norm."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    plain = make().to(dtype).train()
    other = copy.deepcopy(plain)
    batches = [_in(dtype, batch(seed)) for seed in range(STEPS)]
    found = []
    for model, device in ((plain, "cuda"), (other, "cpu")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # above the rounding of gradients that are zero
        given = {"micro_batches": 3, "device": device, "block_compiler": "eager", **UPDATES[update], **options}
        if update != "at_step":
            given["optimizer"] = optimizer
        compiled = torch.compile(model, backend="l2l", fullgraph=True, options=given)
        losses = trained(compiled, batches, optimizer)
        found.append([torch.tensor(losses), *model.parameters(), *model.buffers()])
    return max(_distance(ours, theirs) for ours, theirs in zip(*found, strict=True))


def _in(dtype: torch.dtype, batch: Batch) -> Batch:
    if isinstance(batch, dict):
        return {name: _in(dtype, value) for name, value in batch.items()}
    return batch.to(dtype) if batch.is_floating_point() else batch


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    distance = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return distance if distance == distance else float("inf")
