"""Collectives of the ranks over which a stage is sharded, in virtual time, on sizes alone.

As `runtime/collective_handlers.py`, and as `Ranks.gather` and `Ranks.reduce_scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.program import Program
from l2l_compile.ir.values import Bindings
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.ranks.ranks import reduced_entries
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.runtime.slab import slots
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import Ring
from l2l_compile.simulation.simulated_device import Clocks, SimulatedLane


class CollectiveRun(Protocol):
    """The program that runs (`graph_times.py`)."""

    program: Program
    options: Options
    machine: Machine
    bindings: Bindings
    clocks: Clocks
    lanes: Mapping[str, SimulatedLane]

    @property
    def ring(self) -> Ring: ...

    @property
    def takes_norms(self) -> bool: ...

    def move(self, size: int, launches: int = 1) -> None: ...

    def submit(self, lane: str, reads: Sequence[TimedValue], fills: Sequence[TimedValue], work: Callable[[], None]) -> None: ...


def all_gather_weights(run: CollectiveRun, node: fx.Node, segment: int, slab: TimedValue) -> TimedValue:
    """The node `all_gather_weights`: the shards of a segment's weights, all together."""
    result = TimedValue(slab=slab.slab)
    size = sum(slot.bytes for slot in slots(run.program.segments[segment], run.bindings) if slot.is_gathered)

    def work() -> None:
        if size:
            run.clocks.queue(run.ring.seconds(size))

    run.submit(Lane.COMM, (slab,), (result,), work)
    return result


def reduce_scatter_gradients(run: CollectiveRun, node: fx.Node, segment: int, gradients: TimedValue) -> TimedValue:
    """The node `reduce_scatter_gradients`: this rank's shards of the means, in the dtypes of the link."""
    result = TimedValue(absent=gradients.absent)
    if result.absent:
        return result
    run.lanes[Lane.COMM].wait(run.lanes[Lane.COMPUTE].record())  # memory that compute may have released before
    run.submit(Lane.COMM, (gradients,), (result,), lambda: _reduce(run, segment, gradients, result))
    return result


def _reduce(run: CollectiveRun, segment: int, gradients: TimedValue, result: TimedValue) -> None:
    """Sum gradients over the ranks (comm lane). Fills `result` with this rank's shards."""
    reduced = run.program.segments[segment]
    shared: dict[torch.dtype, list[ShardSpec]] = {}
    sharded: dict[torch.dtype, list[ShardSpec]] = {}
    sizes: list[tuple[int, int]] = []  # bytes of a mean, and of what crosses the link
    for index, (_, dtype) in gradients.sums.items():
        spec, wide = reduced.weights[index].shard_spec, torch.promote_types(dtype, torch.float32)
        assert spec is not None, "a sharded segment has sharded weights"
        (shared if spec.replicated else sharded).setdefault(wide, []).append(spec)
        entries = math.prod(spec.shape_of(0))
        on_link = gradient_dtype(reduced.block.weights[index], run.options.gradients_on_link).itemsize
        sizes.append((entries * wide.itemsize, entries * on_link))
    for dtype, specs in shared.items():
        _gather_sum(run, sum(spec.entries for spec in specs) * dtype.itemsize)
    for dtype, specs in sharded.items():
        _scatter_sum(run, specs, dtype)
    for mean, on_link in sizes:
        run.move(2 * mean)
        if mean != on_link:
            run.move(mean + on_link)
    result.parts, result.has_norms = [on_link for _, on_link in sizes], run.takes_norms
    for size in result.parts if result.has_norms else ():
        run.move(size)


def _gather_sum(run: CollectiveRun, size: int) -> None:
    """Sums of values that each rank has whole: all are gathered, and added up in the order of ranks."""
    ranks = run.ring.ranks
    run.move(2 * size)  # joined
    run.clocks.queue(run.ring.seconds(ranks * size))
    run.move((3 * ranks - 3) * size, ranks - 1)


def _scatter_sum(run: CollectiveRun, specs: Sequence[ShardSpec], dtype: torch.dtype) -> None:
    """Sums of which each rank gets its shards, through a buffer of bounded size."""
    ranks, total = run.ring.ranks, sum(spec.entries for spec in specs)
    width = min(total, reduced_entries(ranks, dtype))
    run.move(ranks * width * dtype.itemsize)  # zeros
    for first in range(0, total, width):
        end = min(first + width, total)
        row = (end - first) * dtype.itemsize
        run.move(ranks * row)  # zeros
        _fill(run, specs, dtype, first, end)
        if end - first < width:
            run.move(2 * ranks * row)  # made contiguous
        run.clocks.queue(run.ring.seconds(ranks * row))
        run.move(2 * row)


def _fill(run: CollectiveRun, specs: Sequence[ShardSpec], dtype: torch.dtype, first: int, end: int) -> None:
    """As `Ranks._fill`: a copy for the rows that a gradient fills completely, and another one for the row that it fills in part."""
    start = 0
    for spec in specs:
        columns = min(start + spec.entries, end) - max(start, first)
        if columns > 0:
            whole, left = divmod(math.prod(spec.shape), spec.entries)
            run.move(2 * whole * columns * dtype.itemsize)
            run.move(2 * min(columns, max(0, left - max(0, first - start))) * dtype.itemsize)
        start += spec.entries
