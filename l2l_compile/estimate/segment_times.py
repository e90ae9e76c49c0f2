"""The inner loop of a segment in virtual time: `runtime/segment_run.py`, on sizes alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from l2l_compile.estimate.block_seconds import BlockRun, run_of
from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.lowering.code_cache import Lowered
from l2l_compile.lowering.savings import Savings
from l2l_compile.options import Options
from l2l_compile.runtime.kept_activations import KeptLevels
from l2l_compile.runtime.rows import StepRows
from l2l_compile.simulation.blocks import BlockResult
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import Clocks

_HALF = (torch.bfloat16, torch.float16)


class TimedProgram(Protocol):
    """The program that runs (`graph_times.py`)."""

    options: Options
    machine: Machine
    clocks: Clocks
    bindings: Bindings
    rows: StepRows
    levels: Mapping[int, KeptLevels]
    savings: Savings
    timer: Any
    sums: dict[int, dict[int, tuple[int, torch.dtype]]]

    @property
    def takes_norms(self) -> bool: ...

    def move(self, size: int, launches: int = 1) -> None: ...


class SegmentTimes(ABC):
    """A segment that runs micro-batch by micro-batch.

    count    how many micro-batches the segment has
    lowered  the code of those that run now, by their numbers: of all, or of one turn
    """

    lowered: Mapping[int, Lowered]

    def __init__(self, run: TimedProgram, segment: Segment, turn: int | None = None):
        self.run, self.segment, self.block = run, segment, segment.block
        self.sizes, self.levels = run.rows.bindings_of(segment), run.levels.get(segment.index)
        self.count, self.turn = len(self.sizes), turn
        self.numbers = range(self.count) if turn is None else [turn]

    def inner_loop(self) -> None:
        """All micro-batches that run now, one after another."""
        for number in self.numbers:
            self.micro_batch(number)

    @property
    def first_code(self) -> Lowered:
        """The code of the first micro-batch that runs now."""
        return next(iter(self.lowered.values()))

    @abstractmethod
    def micro_batch(self, number: int) -> None:
        """The work of a micro-batch (compute lane)."""

    def call(self, lowered: Lowered) -> BlockRun:
        """Run a block."""
        clocks, machine, made = self.run.clocks, self.run.machine, run_of(lowered)
        clocks.spend(machine.micro_batch)
        clocks.queue(made.seconds, made.kernels)
        return made

    def level(self, number: int) -> int | None:
        """The level of what a micro-batch keeps for backward; None for nothing."""
        part = self.levels.parts[number] if self.levels is not None else None
        return part.level if part is not None else None


class ForwardTimes(SegmentTimes):
    """The forward of a segment. Its results fill up as micro-batches run.

    kept, sent  what it keeps on the device, and what it sends to the host
    on_host     for each micro-batch, whether it keeps something on the host
    """

    def __init__(self, run: TimedProgram, segment: Segment, wanted: Sequence[int], turn: int | None):
        super().__init__(run, segment, turn)
        count = len(self.block.outputs)
        self.wanted = tuple(i in wanted for i in range(count)) if wanted else None
        self.lowered = {number: self._lower(number, self.sizes[number]) for number in self.numbers}
        parts = self.levels.parts if self.levels is not None else [None] * len(self.sizes)
        self.on_host = [part is not None and part.on_host for part in parts]
        self.results = [TimedValue() for _ in range(count)]
        self.kept = TimedValue(absent=all(part is None or part.on_host for part in parts))
        self.sent = TimedValue(absent=not any(self.on_host), sent=[[] for _ in self.sizes])

    def _lower(self, number: int, at: Bindings) -> Lowered:
        if (level := self.level(number)) is not None and self.levels is not None:
            return self.run.savings.saving((self.block, at, self.levels.mask, level)).forward
        lowering = self.run.timer.lowering
        return lowering.forward(self.block, at, number > 0, self.wanted)

    def micro_batch(self, number: int) -> None:
        lowered = self.lowered[number]
        made = self.call(lowered).results
        count = sum(lowered.present)
        for each in made[count:]:
            self._lay_out(each)
        if self.on_host[number]:
            self.sent.sent[number] = [_bytes(each) for each in made[count:] if each.shape]  # a number alone costs nothing
        there = [
            pair
            for pair, exists in zip(zip(self.results, self.block.outputs, strict=True), lowered.present, strict=True)
            if exists
        ]
        for (result, spec), each in zip(there, made, strict=False):
            if number == 0 or not spec.computed_once:
                self._lay_out(each)
                result.parts += self._equal_parts(result, spec) if spec.equal_rows else [_bytes(each)]

    def _lay_out(self, made: BlockResult) -> None:
        if not _is_contiguous(made):
            self.run.move(2 * _bytes(made))

    def _equal_parts(self, result: TimedValue, spec: TensorSpec) -> list[int]:
        """The micro-batches of a value whose rows are equal."""
        result.equal = True
        return [math.prod(shape) * spec.dtype.itemsize for shape in self.run.rows.shapes(spec, is_split=True)]


class BackwardTimes(SegmentTimes):
    """The backward of a segment, to which the gradients `arriving` come.

    results  the gradients of its values, and a bundle with those of its weights
    sums     by the index of an operand whose gradient is summed over micro-batches: entries, and the dtype of the sum. With
             turns, those of the turns so far
    """

    def __init__(self, run: TimedProgram, segment: Segment, arriving: Sequence[TimedValue], turn: int | None):
        super().__init__(run, segment, turn)
        self.arriving, self.mask = arriving, tuple(not g.absent for g in arriving)
        self.lowered = {number: self._lower(number, self.sizes[number]) for number in self.numbers}
        self.whole = None
        if self.block.summed_whole and self.count > 1 and not self.first_code.random:
            self.whole = run.timer.lowering.backward(self.block, segment.bindings(run.bindings), self.mask)
        self.first, present = len(self.block.weights), self.first_code.present
        self.results = [TimedValue(absent=not exists) for exists in present[self.first :]]
        self.results.append(TimedValue(absent=not any(present[: self.first])))
        self.operands = [(i, spec) for i, spec in enumerate(self.block.operands) if present[i]]
        self.sums: dict[int, tuple[int, torch.dtype]] = run.sums.pop(segment.index, {})
        if turn is not None and turn < self.count - 1:
            run.sums[segment.index] = self.sums

    def _lower(self, number: int, at: Bindings) -> Lowered:
        if (level := self.level(number)) is not None and self.levels is not None and self.levels.mask == self.mask:
            return self.run.savings.saving((self.block, at, self.mask, level)).backward
        lowering = self.run.timer.lowering
        return lowering.backward(self.block, at, self.mask)

    def micro_batch(self, number: int) -> None:
        for value, spec in zip(self.arriving, self.block.outputs, strict=True):
            self._arrive(value, spec, number)
        made = self.call(self.lowered[number]).results
        for (index, spec), each in zip(self.operands, made, strict=True):
            if spec.splits and self.block.inner_looped:
                if index >= self.first:
                    self.results[index - self.first].parts.append(_bytes(each))
            else:
                self._sum(index, each)
        if number == self.count - 1:
            self._finish()

    def _arrive(self, value: TimedValue, spec: TensorSpec, number: int) -> None:
        """As `gradient_of`."""
        if value.absent or not spec.shape:
            return
        looped = self.block.inner_looped is True
        if (looped and spec.partial is not None) or (number > 0 and not (looped and spec.splits)):
            self.run.move(2 * value.parts[0])

    def _sum(self, index: int, made: BlockResult) -> None:
        """Add a gradient of a micro-batch to those before."""
        entries, dtype = math.prod(made.shape), made.dtype
        if index in self.sums:
            moved = entries * (2 * self.sums[index][1].itemsize + dtype.itemsize)
        else:
            is_widened = self.count > 1 and dtype in _HALF
            self.sums[index] = entries, torch.float32 if is_widened else dtype
            moved = entries * (4 + dtype.itemsize) if is_widened else 0
        if made.shape:
            self.run.move(moved)

    def _finish(self) -> None:
        """After the last micro-batch: sums in the dtypes of results and of the link, and norms where updates need them."""
        if self.whole is not None:
            self.call(self.whole)
        for index, (result, spec) in enumerate(zip(self.results[:-1], self.block.values, strict=True), self.first):
            if not result.absent and not result.parts:
                result.parts = [self._cast(index, spec.gradient_dtype)]
        options, bundle = self.run.options, self.results[-1]
        if self.segment.sharded:  # the reduction over the ranks casts them
            bundle.sums = {i: self.sums[i] for i in range(self.first) if i in self.sums}
            return
        for index, spec in enumerate(self.block.weights):
            if index in self.sums:
                bundle.parts.append(self._cast(index, gradient_dtype(spec, options.gradients_on_link)))
        bundle.has_norms = self.run.takes_norms
        for size in bundle.parts if bundle.has_norms else ():
            self.run.move(size)

    def _cast(self, index: int, to: torch.dtype) -> int:
        """The bytes of a sum in another dtype."""
        entries, dtype = self.sums[index]
        if dtype != to:
            self.run.move(entries * (dtype.itemsize + to.itemsize))
        return entries * to.itemsize


def _bytes(made: BlockResult) -> int:
    return math.prod(made.shape) * made.dtype.itemsize


def _is_contiguous(made: BlockResult) -> bool:
    expected = 1
    for size, stride in zip(reversed(made.shape), reversed(made.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
