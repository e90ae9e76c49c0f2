"""Measured seconds of blocks: runs the code of a real step, on random numbers with the sizes of that step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import fx

from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.devices.host import HOST
from l2l_compile.ir.values import Bindings, dim_of, evaluate
from l2l_compile.lowering.code_cache import Lowered
from l2l_compile.lowering.costs import Rates
from l2l_compile.lowering.lower import Lowering, Request
from l2l_compile.lowering.savings import Savings
from l2l_compile.simulation.clocks import Stopwatch, stopwatch_of

_SETS = 3  # sets of operands that take turns, as the operands of micro-batches do
_HELD = 4  # runs whose results stay in memory
_AT_LEAST = 0.3  # seconds of measurement for a block


class BlockTimes(Protocol):
    """The time that a block takes."""

    def seconds(self, request: Request) -> float:
        """Seconds of a block at its sizes, the launches of its kernels included."""


class MeasuredTimes:
    """Runs blocks on this host. Called outside of fake modes."""

    def __init__(self, block_compiler: str, rates: Rates | None = None):
        self._savings = Savings(Lowering(HOST, block_compiler), block_compiler != "eager", rates)
        self._watch = stopwatch_of(HOST)

    def seconds(self, request: Request) -> float:
        code, sizes = self._savings.code(request)
        at = dict(zip(code.guards.symbols, sizes, strict=True))
        with torch.no_grad(), torch.random.fork_rng([]), CpuDevice().running():
            return time_of(code.at(sizes), at, len(request[0].weights), self._watch)


def time_of(lowered: Lowered, bindings: Bindings, weights: int, watch: Stopwatch) -> float:
    """Seconds of a lowered block on random operands. The first `weights` operands are weights, the same in each run."""
    first, *others = (list(_operands(lowered.graph.graph, bindings)) for _ in range(_SETS))
    sets = itertools.cycle([first, *([*first[:weights], *other[weights:]] for other in others)])
    return watch.seconds(_runs(lowered.run, sets), at_least=_AT_LEAST)


def _runs(run: Callable, sets: Iterator[list[torch.Tensor]]) -> Callable[[], object]:
    """Each call runs the block on the next set of operands. The last results stay in memory, as in a real step."""
    held: deque = deque(maxlen=_HELD)
    return lambda: held.append(run(*next(sets)))


def _operands(graph: fx.Graph, bindings: Bindings) -> Iterator[torch.Tensor]:
    """Random numbers in the place of the operands. Whole numbers are 0, which is a valid index into any tensor."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            shape, stride = ([evaluate(dim_of(size), bindings) for size in sizes] for sizes in (value.shape, value.stride()))
            made = torch.empty_strided(shape, stride, dtype=value.dtype)
            yield made.normal_(std=0.1) if value.is_floating_point() else made.zero_()
