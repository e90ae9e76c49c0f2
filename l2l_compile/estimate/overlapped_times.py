"""Values in virtual time, and copies of some beside the micro-batches of a segment, on sizes alone.

As `runtime/overlapped_copies.py` and `runtime/activation_copies.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.runtime.activation_copies import ahead
from l2l_compile.runtime.rows import StepRows
from l2l_compile.simulation.simulated_device import SimulatedEvent, SimulatedLane


@dataclass(eq=False)
class TimedValue:
    """A value of a program, by its sizes: bytes of its tensor, or of that of each micro-batch. The rest as in `RuntimeValue`.

    equal      whether its micro-batches are views of the same rows
    sent       of what is kept on the host, for each micro-batch: bytes of its tensors
    sums       of gradients that are still to be reduced over ranks: entries and dtype of each, by the index of the weight
    has_norms  of gradients, whether the device has taken their norms
    written    of a value on disk: when it is there
    """

    parts: list[int] = field(default_factory=list)
    absent: bool = False
    lane: str | None = None
    event: SimulatedEvent | None = None
    readers: dict[str, SimulatedEvent] = field(default_factory=dict)
    results: list[TimedValue] = field(default_factory=list)
    slab: int | None = None
    unfetched: frozenset[int] = frozenset()
    tensors: Any = None  # for `Slabs`
    pinned: bool = False
    equal: bool = False
    sent: list[list[int]] = field(default_factory=list)
    sums: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)
    has_norms: bool = False
    arrival: Any = None
    outgoing: list[Any] | None = None
    written: SimulatedEvent | None = None


class TimedRun(Protocol):
    """The program that runs (`graph_times.py`)."""

    options: Options
    rows: StepRows
    lanes: Mapping[str, SimulatedLane]
    timer: Any

    def copies(self, parts: Sequence[int], up: bool, pinned: bool = True) -> None: ...

    def send(self, parts: Sequence[int], target: TimedValue, ahead_of: int) -> None: ...


class OutputTimes:
    """As `OutputStream` of `runtime/overlapped_copies.py`."""

    def __init__(self, run: TimedRun, outputs: Sequence[TimedValue]):
        self.run, self.outputs = run, outputs
        self._sent: SimulatedEvent | None = None

    def before(self, number: int) -> None:
        """Nothing is waited for."""

    def after(self, number: int) -> None:
        self._free()
        lanes = self.run.lanes
        lanes[Lane.D2H].wait(lanes[Lane.COMPUTE].record())
        with self.run.timer.on(Lane.D2H):
            self.run.copies([output.parts[number] for output in self.outputs], up=False)
        self._sent = lanes[Lane.D2H].record()

    def end(self) -> None:
        copied = self._sent
        self._free()
        for output in self.outputs:
            output.lane, output.event, output.pinned = Lane.D2H, copied, True

    def _free(self) -> None:
        if self._sent is not None:
            self.run.lanes[Lane.COMPUTE].wait(self._sent)


class ActivationsToHostTimes:
    """As `SentActivations`."""

    def __init__(self, run: TimedRun, target: TimedValue, on_host: Sequence[bool]):
        self.run, self.target, self.on_host = run, target, on_host

    def before(self, number: int) -> None:
        """Nothing is waited for."""

    def after(self, number: int) -> None:
        if self.on_host[number]:
            parts = self.target.sent[number]
            self.run.send(parts, self.target, ahead(self.run.options.prefetch, len(self.on_host)))

    def end(self) -> None:
        """The last copies run while the next segment is computed."""


class ActivationsFromHostTimes:
    """As `ActivationsFromHost`."""

    def __init__(self, run: TimedRun, source: TimedValue, target: TimedValue):
        self.run, self.source, self.target = run, source, target
        self._waiting = deque(number for number, parts in enumerate(source.sent) if parts)
        self._ahead = ahead(run.options.prefetch, len(source.sent))
        self._there: dict[int, SimulatedEvent] = {}
        self._bring(self._ahead)

    def before(self, number: int) -> None:
        is_next = bool(self._waiting) and self._waiting[0] == number
        self._bring(self._ahead + (number in self._there or is_next))
        if number in self._there:
            self.run.lanes[Lane.COMPUTE].wait(self._there[number])

    def after(self, number: int) -> None:
        self._there.pop(number, None)

    def end(self) -> None:
        """Everything is freed already."""

    def _bring(self, count: int) -> None:
        h2d = self.run.lanes[Lane.H2D]
        while self._waiting and len(self._there) < count:
            number = self._waiting.popleft()
            with self.run.timer.on(Lane.H2D):
                self.run.copies(self.source.sent[number], up=True)
            self._there[number] = h2d.record()
            self.target.lane, self.target.event = Lane.H2D, self._there[number]


class GradientTimes:
    """As `GradientStream` of `runtime/overlapped_copies.py`."""

    def __init__(self, run: TimedRun, count: int, gradients: Sequence[tuple[TimedValue, TensorSpec]]):
        self.run, self.count, self.gradients = run, count, gradients
        self._events: list[SimulatedEvent] = []
        self._bring(0)

    def before(self, number: int) -> None:
        if number + 1 < self.count:
            self._bring(number + 1)
        self.run.lanes[Lane.COMPUTE].wait(self._events[number])

    def after(self, number: int) -> None:
        """It is freed."""

    def end(self) -> None:
        """Every gradient is freed already."""

    def _bring(self, number: int) -> None:
        h2d, rows = self.run.lanes[Lane.H2D], self.run.rows
        with self.run.timer.on(Lane.H2D):
            for source, spec in self.gradients:
                shapes = rows.shapes(spec, is_split=True)
                self.run.copies([math.prod(shapes[number]) * spec.gradient_dtype.itemsize], up=True, pinned=source.pinned)
        self._events.append(h2d.record())
