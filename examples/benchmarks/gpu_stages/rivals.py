"""The alternatives to streamed layers in comparisons: a model resident on the GPU, and FSDP2 with parameters on the host."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .transformer import Decoder, Size, build

Batch = dict[str, torch.Tensor]


class Resident:
    """Weights, gradients and AdamW's state on the device; layers compiled by Inductor, and recomputed in backward."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype | None, compile_layers: bool):
        self.model = build(Decoder, size, device=device)
        self.model.recompute = True
        if compile_layers:
            for layer in self.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device, self.dtype = device, dtype

    def loss(self, part: Batch) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.model(**part)

    def step(self, batch: Batch, micro_batches: int) -> float:
        total = torch.zeros((), device=self.device)
        for part in micro_batches_of(batch, micro_batches):
            loss = self.loss({name: value.to(self.device, non_blocking=True) for name, value in part.items()}) / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()


class Sharded(Resident):
    """FSDP2 over one process with `CPUOffloadPolicy`: a layer's parameters are copied to the GPU for each use, in bf16.

    Gradients stay on the GPU over the micro-batches of a step (no reduction before the last one): FSDP2's fastest setting.
    """

    def __init__(self, size: Size, device: torch.device):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.model = build(Decoder, size)
        # a checkpoint around a sharded layer would recompute with inputs that FSDP2 does not cast again
        self.model.layers = torch.nn.ModuleList(map(checkpoint_wrapper, self.model.layers))
        mesh = init_device_mesh("cuda", (1,))
        policy = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        }
        for layer in self.model.layers:
            layer.compile()
            fully_shard(layer, **policy)
        fully_shard(self.model, **policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device, self.dtype = device, None

    def step(self, batch: Batch, micro_batches: int) -> float:
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(micro_batches_of(batch, micro_batches), 1):
            self.model.set_requires_gradient_sync(number == micro_batches)
            loss = self.model(**{name: value.to(self.device) for name, value in part.items()}) / micro_batches
            loss.backward()
            total += loss.detach().float()
        torch.cuda.synchronize(self.device)  # gradients are on the host
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()


def micro_batches_of(batch: Batch, count: int) -> list[Batch]:
    """The batch in slices of its rows."""
    parts = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: parts[name][i] for name in batch} for i in range(len(next(iter(parts.values()))))]


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A group of this process alone; it needs no network."""
    torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # NCCL looks for a network even for one process
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("nccl", init_method=f"file://{Path(folder) / 'group'}", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
