"""Lowers blocks to what a step in virtual time needs of them: seconds, kernel launches, and the sizes of results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import fx

from l2l_compile.devices.registry import is_absent, traced_on
from l2l_compile.lowering.code_cache import Code, Lowered
from l2l_compile.lowering.costs import kernels_of
from l2l_compile.lowering.lower import Lowering, Request
from l2l_compile.options import Options
from l2l_compile.simulation.blocks import BlockResult, results_of
from l2l_compile.simulation.machine import Machine


@dataclass(frozen=True)
class BlockRun:
    """A run of a block on a machine: `seconds` of its kernels, their number, and its results."""

    seconds: float
    kernels: int
    results: tuple[BlockResult, ...]

    def __call__(self, *_: torch.Tensor) -> NoReturn:
        raise AssertionError("this block has no code: it is timed, and not run")


class TimedLowering(Lowering):
    """Traces blocks as a step on a machine does. The code of a block is a `BlockRun`: the roofline of its kernels."""

    def __init__(self, device: torch.device, machine: Machine, fused: bool):
        super().__init__(traced_on(device), "eager", is_absent(device))
        self.machine, self.fused = machine, fused

    def tracing_alone(self) -> Lowering:
        return self

    def at_sizes(self, code: Code, sizes: tuple[int, ...], request: Request) -> Lowered:
        lowered, at = code.at(sizes), dict(zip(code.guards.symbols, sizes, strict=True))
        graph: fx.Graph = lowered.graph.graph
        kernels = kernels_of(graph, at, fused=self.fused)
        seconds = sum(kernel.seconds(self.machine) for kernel in kernels)
        return replace(lowered, run=BlockRun(seconds, len(kernels), results_of(graph, at)))


def timed_lowering(options: Options, machine: Machine) -> TimedLowering:
    """The lowering of a model with these options, on a machine."""
    return TimedLowering(options.device, machine, fused=options.block_compiler == "inductor")


def run_of(lowered: Lowered) -> BlockRun:
    """The run of a block that `TimedLowering` has lowered."""
    assert isinstance(lowered.run, BlockRun)
    return lowered.run
