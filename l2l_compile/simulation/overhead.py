"""The caller's own time in a step: the time of the interpreter for a node, and for a micro-batch of a segment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from l2l_compile.backend import new_runner
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.code_cache import Lowered
from l2l_compile.lowering.lower import Lowering
from l2l_compile.options import Options
from l2l_compile.runtime.runner import Runner
from l2l_compile.session import Session
from l2l_compile.simulation.clocks import caller_clock
from l2l_compile.torch_internals.fresh_code import fresh_caller

_LAYERS, _WIDTH, _STEPS = 24, 8, 9
_MICRO_BATCHES = (1, 8)


@dataclass(frozen=True)
class Overhead:
    """Seconds of the caller.

    node         seconds for a node of a program
    micro_batch  seconds for each micro-batch of a segment, besides the code of the block
    """

    node: float
    micro_batch: float


@dataclass(frozen=True)
class CallerTime:
    """Of one step: the number of nodes, the number of calls of blocks, and the caller's seconds outside of the blocks."""

    nodes: int
    calls: int
    seconds: float


def measured_overhead(device: torch.device) -> Overhead:
    """Measure steps of a deep stack of tiny layers at two numbers of micro-batches, without the time in the code of blocks."""
    return overhead_of(*(_own(device, micro_batches) for micro_batches in _MICRO_BATCHES))


def overhead_of(few: CallerTime, many: CallerTime) -> Overhead:
    """The overhead from two steps of one model, which differ only in the number of micro-batches, so in the calls of blocks."""
    micro_batch = max((many.seconds - few.seconds) / (many.calls - few.calls), 1e-9)
    return Overhead(max((few.seconds - few.calls * micro_batch) / few.nodes, 1e-9), micro_batch)


class _Layer(nn.Module):
    """A residual MLP after a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Counted(Lowering):
    """Counts the calls of blocks, and the caller's seconds in them."""

    def __init__(self, device: torch.device, clock: Callable[[], float]):
        super().__init__(device, "eager")
        self.calls, self.seconds, self._clock = 0, 0.0, clock

    def _at(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Lowered:
        lowered = super()._at(block, bindings, which, wanted)
        return replace(lowered, run=self._counted(lowered.run))

    def _counted(self, run: Callable) -> Callable:
        def counted(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
            start = self._clock()
            try:
                return run(*operands)
            finally:
                self.seconds += self._clock() - start
                self.calls += 1

        return counted


class _Backend:
    """A backend that keeps the runners of a session whose lowering counts."""

    streams_layers = True  # `dynamo.mark_batches` looks for this attribute
    __name__ = "l2l_overhead"

    def __init__(self, session: Session):
        self.session = session
        self.skipped: list = []
        self.runners: list[Runner] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        self.runners.append(new_runner(gm, self.session))
        return self.runners[-1]


def _own(device: torch.device, micro_batches: int) -> CallerTime:
    options = Options.build({"device": device, "micro_batches": micro_batches, "block_compiler": "eager"})
    clock = caller_clock()
    counted = _Counted(device, clock)
    backend = _Backend(Session(options, lowering=counted))
    model = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
    compiled = torch.compile(fresh_caller(), backend=backend)
    x = torch.randn(max(_MICRO_BATCHES), _WIDTH)
    seconds = []
    for _ in range(_STEPS):
        counted.calls, counted.seconds, start = 0, 0.0, clock()
        compiled(model, x).sum().backward()
        seconds.append(clock() - start - counted.seconds)
    (runner,) = backend.runners
    graphs = (runner.program.forward, runner.program.backward)
    nodes = sum(node.op == "call_function" for module in graphs if module is not None for node in module.graph.nodes)
    return CallerTime(nodes, counted.calls, statistics.median(seconds[2:]))
