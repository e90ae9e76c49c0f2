"""Blocks that take time and compute nothing. Their real traces give the sizes of results, the FLOPs and the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from l2l_compile.devices.host import HOST
from l2l_compile.devices.registry import ACCELERATOR, is_absent, traced_on
from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.values import Bindings, dim_of, evaluate
from l2l_compile.lowering.code_cache import Code, Lowered
from l2l_compile.lowering.costs import kernels_of
from l2l_compile.lowering.lower import Lowering, Request
from l2l_compile.simulation.block_times import BlockTimes
from l2l_compile.simulation.simulated_device import SimulatedDevice, SimulatedHost


@dataclass(frozen=True)
class BlockResult:
    """A result of a block: memory of its own, or a view of the memory of an operand or of an earlier result.

    of    the position of the viewed tensor among the operands, followed by the results; None for memory of its own
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int | None


@dataclass(frozen=True)
class _Simulated:
    """The callable that replaces a block's code."""

    device: SimulatedDevice | SimulatedHost
    results: tuple[BlockResult, ...]
    seconds: float
    kernels: int

    def __call__(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        self.device.clocks.queue(self.seconds, self.kernels)
        there = list(operands)
        for result in self.results:
            if result.of is None:
                made = self.device.empty(torch.Size(result.shape), result.dtype)
            else:
                made = there[result.of].as_strided(result.shape, result.stride, result.offset)
            there.append(made)
        return there[len(operands) :]


class SimulatedLowering(Lowering):
    """Traces blocks as a real step does. The code only advances the clock of the device by the time of the block's kernels.

    times  gives the seconds of a block; if None, they are the roofline of its kernels
    """

    def __init__(self, device: SimulatedDevice | SimulatedHost, compiled: bool, times: BlockTimes | None = None):
        on = ACCELERATOR if device.machine.overlaps else HOST
        super().__init__(traced_on(on), "eager", is_absent(on))
        self.simulated, self.compiles, self.times = device, compiled, times

    def ahead(self, requests: Iterable[Request]) -> None:
        """Does nothing: no code is compiled."""

    def _at_first(self, *request: Any) -> Lowered:
        with _disable_current_modes():
            return super()._at_first(*request)

    def tracing_alone(self) -> Lowering:
        return self

    def apart(self) -> AbstractContextManager:
        return _disable_current_modes()

    def at_sizes(self, code: Code, sizes: tuple[int, ...], request: Request) -> Lowered:
        lowered, at = code.at(sizes), dict(zip(code.guards.symbols, sizes, strict=True))
        seconds, kernels = self._times_of(lowered.graph.graph, at, request)
        run = _Simulated(self.simulated, results_of(lowered.graph.graph, at), seconds, kernels)
        return Lowered(lowered.traced, run, (), lowered.workspace_bytes)

    def _times_of(self, graph: fx.Graph, bindings: Bindings, request: Request) -> tuple[float, int]:
        """Seconds of a block, and the number of kernel launches that these seconds do not include."""
        if self.times is not None:
            return self.times.seconds(request), 0
        kernels = kernels_of(graph, bindings, fused=self.compiles)
        return sum(kernel.seconds(self.simulated.machine) for kernel in kernels), len(kernels)


def results_of(graph: fx.Graph, bindings: Bindings) -> tuple[BlockResult, ...]:
    """The results of an ATen graph at these sizes."""
    operands = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    memory = [value.untyped_storage()._cdata for value in operands if isinstance(value, torch.Tensor)]
    (returned,) = arguments(graph.output_node())
    found = []
    for node in returned:
        value = node.meta["val"]
        storage = value.untyped_storage()._cdata
        shape, stride = (tuple(evaluate(dim_of(size), bindings) for size in sizes) for sizes in (value.shape, value.stride()))
        offset = evaluate(dim_of(value.storage_offset()), bindings)
        found.append(BlockResult(shape, stride, offset, value.dtype, memory.index(storage) if storage in memory else None))
        memory.append(storage)
    return tuple(found)
