"""A small model that trains with and without the option `disk`; all of its matrices are large enough to be on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import l2l_compile
from l2l_compile.host.disk_plan import disk_plan
from l2l_compile.host.stored_parameters import StoredParameters
from l2l_compile.options import Options
from l2l_compile.ranks.sharded import local
from l2l_compile.session import session_of
from models import compiled

WIDTH = 512  # a matrix of this width takes 1 MiB in fp32
LAYERS = 3
RING = 8 << 20  # bytes: the least that there is
SLOW = 2e7  # bytes a second


def lion(parameters: Any) -> torch.optim.Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.Lion(parameters, lr=1e-3)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.Lamb(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "lion": lion,
    "lamb": lamb,
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def matrices(shards: int = 1) -> nn.Module:
    """Each shard of a matrix has as many bytes as the matrix of a model without shards."""
    torch.manual_seed(0)
    widths = [WIDTH if number % 2 == 0 else WIDTH * shards for number in range(LAYERS + 1)]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Linear(5, WIDTH), *layers, nn.Linear(widths[-1], 3))


class Adapted(nn.Module):
    """Frozen matrices of 16 bits, trained matrices of low rank beside them."""

    def __init__(self, width: int = 768):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(3))
        self.base.requires_grad_(False)
        self.low, self.high = (nn.ModuleList(nn.Linear(*sizes) for _ in range(3)) for sizes in ((width, 4), (4, width)))
        self.first = nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for base, low, high in zip(self.base, self.low, self.high, strict=True):
            x = x + torch.tanh(base(x.to(base.weight.dtype)).to(x.dtype) + high(low(x)))
        return x


class WithLoss(nn.Module):
    """The same model with its loss, as stages of a pipeline have it."""

    def __init__(self, shards: int = 1) -> None:
        super().__init__()
        self.layers = matrices(shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), x[:, :3].argmax(-1))


@dataclass
class Training:
    """A model under training, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    call: Any
    number: int = 0
    rank: int = 0

    def backward(self) -> None:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(self.number + 1000 * self.rank))
        self.number += 1
        made = self.call(x)
        (made if made.dim() == 0 else made.pow(2).mean()).backward()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def stored(self) -> StoredParameters:
        """What is on disk of a model that has run."""
        found = session_of(self.call).server.updates._stored
        assert found is not None, "trained without the option disk"
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Copies of all parameters and of all tensors of the optimizer's state; of those that are sharded, of this rank's shards."""
        l2l_compile.synchronize(self.call)
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        held = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        return [local(t).detach().clone() for t in (*self.model.parameters(), *held)]


def training(
    optimizer: str = "adamw",
    *,
    model: nn.Module | None = None,
    disk: Any = None,
    spare: int = 200_000,
    stored_copies: bool = False,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Training:
    """With `disk`, only `spare` bytes of parameters and state stay in memory; with `stored_copies`, of copies for the link as well.

    A model, or this one, and a loop that starts anew. The model is sharded over the last dimension of `mesh`.
    """
    torch._dynamo.reset()
    if model is None:
        model = matrices() if mesh is None else l2l_compile.shard(matrices(mesh.size(mesh.ndim - 1)), mesh)
    made = training_of(model, optimizer, disk, spare, stored_copies, **options)
    made.rank = mesh.get_rank() if mesh is not None else 0
    return made


def training_of(
    model: nn.Module,
    optimizer: str,
    disk: Any = None,
    spare: int = 200_000,
    stored_copies: bool = False,
    **options: Any,
) -> Training:
    """As `training`, of a model whose segments have no more entries than those of `matrices`."""
    made = OPTIMIZERS[optimizer](model.parameters())
    if disk is not None:
        asked = Options.build({**options, "optimizer": made, "disk": disk, "host_memory": "1TB"})
        plan = disk_plan(asked, largest=WIDTH * (WIDTH + 1))
        copies = 0 if stored_copies else sum(size.copy for size in plan.sizes)
        options = {**options, "disk": disk, "host_memory": plan.beside + copies + RING + spare}
    return Training(model, made, compiled(model, optimizer=made, **options))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
