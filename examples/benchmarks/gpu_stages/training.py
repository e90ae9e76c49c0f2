"""A model compiled for a given device object, and helpers for its training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_compile.backend import make_runner
from l2l_compile.devices.device import Device
from l2l_compile.options import Options
from l2l_compile.runtime.stats import Stats
from l2l_compile.session import Session, open_device
from l2l_compile.testing.strict_device import ThreadedDevice

from .cases import Context

Batch = Mapping[str, torch.Tensor]


class Compiled:
    """As `torch.compile(model, backend="l2l", options=...)`, optionally on a given device object.

    It gives access to its session, and so to objects that a user cannot reach: the device and its page-locked memory.
    """

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any], device: Device | None = None):
        self.model = model
        built = Options.build(options)
        self.session = Session(built, device or open_device(built))

        def backend(gm, example_inputs, **_):
            return make_runner(gm, self.session)

        backend.streams_layers = True  # so that Dynamo marks the batch, as for the backend "l2l"
        self.called = torch.compile(model, backend=backend)

    def __call__(self, *inputs, **named) -> Any:
        return self.called(*inputs, **named)

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
    """The options for the device and the block compiler: blocks run as traced unless a case asks for Inductor."""
    return {"device": context.device, "block_compiler": "eager"}


def stand_in(context: Context, delay: float = 0.0, pinned_memory: int | None = None) -> Device | None:
    """On a machine without a GPU, a device with a thread for each lane. With a GPU, None: the GPU is the device."""
    return None if context.on_gpu else ThreadedDevice(delay, pinned_memory=pinned_memory)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself, or its attribute `loss`."""
    return output if isinstance(output, torch.Tensor) else output.loss


def moved(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def reference_kernels() -> None:
    """Switch TF32 off, so that float32 products are computed in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def one_order_of_sums() -> None:
    """Have attention run in PyTorch's plain kernels. Sums of other kernels have no fixed order, so bits change between runs."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def adamw(model: torch.nn.Module, **more: Any) -> torch.optim.AdamW:
    """AdamW with an `eps` above the rounding of zero gradients: otherwise, rounding moves such entries by the learning rate."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, **more)


def relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The norm of the difference, over the norm of the expected value or `least`, whichever is larger."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return ((actual - expected).norm() / max(expected.norm().item(), least, 1e-300)).item()


def distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of the difference of all tensors together, over the norm of all expected tensors together."""
    pairs = [(a.detach().cpu().double(), e.detach().cpu().double()) for a, e in zip(actual, expected, strict=True)]
    return (sum((a - e).square().sum() for a, e in pairs) / sum(e.square().sum() for _, e in pairs)).sqrt().item()


def warm_up() -> None:
    """Run a tiny step on the host, so that all modules for a first step are imported before the stage's time begins."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    compiled = Compiled(model, {"device": "cpu", "block_compiler": "eager", "micro_batches": 2})
    compiled(torch.ones(4, 4)).sum().backward()
    torch._dynamo.reset()
