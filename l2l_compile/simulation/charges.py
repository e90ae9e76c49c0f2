"""What operations outside of blocks cost: every one that PyTorch runs meanwhile moves the clock of the lane or thread that runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.simulated import SimulatedDevice, SimulatedHost, is_marked, is_pinned, mark
from ..errors import L2LError
from .costs import cost_of, moved, tensors_in

aten = torch.ops.aten


class Charges(TorchDispatchMode):
    """Operations on memory of the device take the lane's time, others the thread's.

    Fake tensors have no numbers. A program that asks for one gets 1, and equal where it compares: gradients are finite, copies up
    to date.
    """

    def __init__(self, device: SimulatedDevice | SimulatedHost):
        super().__init__()
        self.device, self.clocks, self.machine = device, device.clocks, device.machine

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs operations on its piece, which come back here
        if operation.namespace == "_c10d_functional":
            raise L2LError(f"{operation} is called outside of the program: simulate knows the collectives of programs alone")
        if operation is aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        if operation is aten.equal.default:
            return True
        result = operation(*args, **kwargs)
        self._charge(operation, args, kwargs, result)
        return result

    def _charge(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        read = tensors_in((args, kwargs))
        places = {is_marked(t) for t in read if t.dim() > 0}
        if places == {True, False}:
            self._cross(operation, args)
        elif places == {True}:
            for made in tensors_in(result):
                mark(made)
            cost = cost_of(operation, args, kwargs, result)
            if cost.flops or cost.bytes:
                self.clocks.queue(cost.seconds(self.machine))
        elif size := moved(operation, args, kwargs, result):
            self.clocks.spend(size / self.machine.host_bandwidth)

    def _cross(self, operation: OpOverload, args: tuple) -> None:
        """A copy over the link. Raises `RuntimeError` for any other operation that reads host and device."""
        if operation is not aten.copy_.default:
            raise RuntimeError(f"{operation} is given tensors of host and device")
        target, source = args[:2]
        up = is_marked(target)
        bandwidth = self.machine.h2d if up else self.machine.d2h
        self.clocks.copy(target.numel() * target.element_size(), bandwidth, asynchronous=is_pinned(source if up else target))


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
