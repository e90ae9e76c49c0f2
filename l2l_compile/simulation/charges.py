"""The cost of operations outside of blocks: each operation that PyTorch runs advances the clock of its lane or thread."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_compile.errors import L2LError
from l2l_compile.lowering.costs import cost_of, moved, tensors_in
from l2l_compile.simulation.simulated_device import SimulatedDevice, SimulatedHost, is_marked, is_pinned, mark

aten = torch.ops.aten


class Charges(TorchDispatchMode):
    """Within this mode, operations on memory of the device take time of the lane, all other operations time of the thread.

    Fake tensors have no numbers. A program that reads a number gets 1, and a comparison of two tensors gives equal. So
    gradients count as finite, and copies as up to date.
    """

    def __init__(self, device: SimulatedDevice | SimulatedHost):
        super().__init__()
        self.device, self.clocks, self.machine = device, device.clocks, device.machine

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs operations on its local shard, which come back here
        if operation.namespace == "_c10d_functional":
            raise L2LError(f"{operation} is called outside of the program: simulate knows the collectives of programs alone")
        if operation is aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        if operation is aten.equal.default:
            return True
        with torch._C.DisableTorchFunctionSubclass():  # what PyTorch runs by itself is no reading of the loop's
            result = operation(*args, **kwargs)
            self._charge(operation, args, kwargs, result)
        return result

    def _charge(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        read = tensors_in((args, kwargs))
        places = {is_marked(t) for t in read if t.dim() > 0}
        if places == {True, False}:
            self._cross(operation, args)
        elif places == {True} or not read and self._writes_on_the_device(operation, args, kwargs, result):
            for made in tensors_in(result):
                mark(made)
            cost = cost_of(operation, args, kwargs, result)
            if cost.flops or cost.bytes:
                self.clocks.queue(cost.seconds(self.machine))
        elif size := moved(operation, args, kwargs, result):
            self.clocks.spend(size / self.machine.host_bandwidth)

    def _writes_on_the_device(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
        """Whether an operation fills a tensor that it makes from nothing, such as zeros, on the device: in the work of a lane."""
        is_in_lane = self.machine.overlaps and self.clocks.lane is not None
        return is_in_lane and bool(moved(operation, args, kwargs, result))

    def _cross(self, operation: OpOverload, args: tuple) -> None:
        """A copy over the link. Raises `RuntimeError` for any other operation that reads host and device."""
        if operation is not aten.copy_.default:
            raise RuntimeError(f"{operation} is given tensors of host and device")
        target, source = args[:2]
        up = is_marked(target)
        bandwidth = self.machine.h2d if up else self.machine.d2h
        self.clocks.copy(target.nbytes, bandwidth, asynchronous=is_pinned(source if up else target))


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
