"""A model compiled for a device object of our own choice, and one step of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_compile.backend import make_runner
from l2l_compile.devices.device import Device
from l2l_compile.devices.threaded import ThreadedDevice
from l2l_compile.options import Options
from l2l_compile.runtime.step import Stats
from l2l_compile.session import Session, open_device

from .cases import Context

Batch = Mapping[str, torch.Tensor]


class Compiled:
    """What `torch.compile(model, backend="l2l", options=...)` gives, on a device that may be given.

    Its session is at hand, and with it what a user cannot reach: the device and its page-locked memory.
    """

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any], device: Device | None = None):
        self.model = model
        built = Options.build(options)
        self.session = Session(built, device or open_device(built))

        def backend(gm, example_inputs, **_):
            return make_runner(gm, self.session)

        backend.streams_layers = True  # Dynamo is to mark the batch, as for the backend of that name
        self._step = torch.compile(model, backend=backend)

    def __call__(self, *inputs, **named) -> Any:
        return self._step(*inputs, **named)

    @property
    def stats(self) -> Stats:
        return self.session.stats

    @property
    def device(self) -> Device:
        return self.session.device

    def synchronize(self) -> None:
        """Wait for updates that were put off."""
        self.session.server.synchronize()


def device_options(context: Context) -> dict[str, Any]:
    """Where layers run, and how: blocks run as traced unless a case asks for Inductor."""
    return {"device": context.device, "block_compiler": "eager"}


def stand_in(context: Context, delay: float = 0.0, pinned_memory: int | None = None) -> Device | None:
    """On a machine without a GPU the device with a thread for each lane; None on a GPU, which is the device."""
    return None if context.on_gpu else ThreadedDevice(delay, pinned_memory=pinned_memory)


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model gives, by itself or in an output that has one."""
    return output if isinstance(output, torch.Tensor) else output.loss


def moved(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def reference_kernels() -> None:
    """Products in float32 are products in float32: no TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def one_order_of_sums() -> None:
    """Attention runs in PyTorch's plain kernels: the others sum in whatever order blocks end, so that bits change from run to run."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def adamw(model: torch.nn.Module, **more: Any) -> torch.optim.AdamW:
    """An `eps` above the rounding of a gradient that is zero: without it such entries move by the learning rate, either way."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, **more)


def relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The norm of the difference over that of the expected value, or over `least` where that is larger."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return ((actual - expected).norm() / max(expected.norm().item(), least, 1e-300)).item()


def distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of the difference of all tensors together, over that of the expected ones."""
    pairs = [(a.detach().cpu().double(), e.detach().cpu().double()) for a, e in zip(actual, expected, strict=True)]
    return (sum((a - e).square().sum() for a, e in pairs) / sum(e.square().sum() for _, e in pairs)).sqrt().item()


def warm_up() -> None:
    """Have Dynamo and the package import what a first step needs, on the host: called before a stage has its time."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    compiled = Compiled(model, {"device": "cpu", "block_compiler": "eager", "micro_batches": 2})
    compiled(torch.ones(4, 4)).sum().backward()
    torch._dynamo.reset()
