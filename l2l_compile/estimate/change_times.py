"""Changes of the layout of values in virtual time, on sizes alone: split, merge, join, and sums of gradients. As `runtime/executor.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import fx

from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.runtime.rows import StepRows


class ChangingRun(Protocol):
    """The program that runs (`graph_times.py`)."""

    rows: StepRows
    bindings: Bindings

    def compute(self, size: int, reads: Sequence[TimedValue], fills: Sequence[TimedValue], launches: int = 1) -> None: ...

    def submit(self, lane: str, reads: Sequence[TimedValue], fills: Sequence[TimedValue], work: Callable[[], None]) -> None: ...


def split(run: ChangingRun, node: fx.Node, x: TimedValue) -> TimedValue:
    """The node `split`: views where the rows are the first dimension."""
    spec: TensorSpec = node.meta["spec"]
    parts = [math.prod(shape) * spec.dtype.itemsize for shape in run.rows.shapes(spec, is_split=True)]
    is_view = spec.batch is not None and spec.batch.dim == 0 or len(parts) == 1
    return _changed(run, x, parts, 0 if is_view else 2 * sum(parts), len(parts))


def merge(run: ChangingRun, node: fx.Node, x: TimedValue) -> TimedValue:
    """The node `merge`."""
    spec: TensorSpec = node.meta["spec"]
    size = spec.bytes(run.bindings)
    if spec.batch is None:
        moved = (5 * len(x.parts) - 3) * size if spec.shape else 0
        return _changed(run, x, [size], moved, 2 * len(x.parts) - 1)
    return _changed(run, x, [size], 2 * size if len(x.parts) > 1 else 0, 1)


def _changed(run: ChangingRun, x: TimedValue, parts: list[int], moved: int, launches: int) -> TimedValue:
    if x.absent:
        return TimedValue(absent=True)
    result = TimedValue(parts)
    run.compute(moved, (x,), (result,), launches)
    return result


def blank(run: ChangingRun, node: fx.Node) -> TimedValue:
    """The node `blank`."""
    spec = node.meta["spec"]
    result = TimedValue([math.prod(shape) * spec.dtype.itemsize for shape in run.rows.shapes(spec, node.meta["split"])])
    run.compute(sum(result.parts), (), (result,), len(result.parts))
    return result


def accumulate(run: ChangingRun, node: fx.Node, a: TimedValue, b: TimedValue) -> TimedValue:
    """The node `accumulate`."""
    there = [x for x in (a, b) if not x.absent]
    if not there:
        return TimedValue(absent=True)
    result = TimedValue(list(there[0].parts))
    moved = 3 * sum(result.parts) if len(there) == 2 else 0
    run.compute(moved, there, (result,), len(result.parts))
    return result


def join(run: ChangingRun, node: fx.Node, parts: Sequence[TimedValue]) -> TimedValue:
    """The node `join`."""
    there = [part for part in parts if not part.absent]
    result = TimedValue([size for part in there for size in part.parts], absent=not there)
    if there:
        run.submit(Lane.COMPUTE, there, (result,), lambda: None)
    return result
