"""The times of the graphs of a program: each node gives its work to the clocks of its lane, with the waits of `runtime/executor.py`."""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from torch import fx

from l2l_compile.errors import OptionError
from l2l_compile.estimate.block_seconds import TimedLowering
from l2l_compile.estimate.host_times import HostTimes, HostWeight
from l2l_compile.estimate.overlapped_times import (
    ActivationsFromHostTimes,
    ActivationsToHostTimes,
    GradientTimes,
    OutputTimes,
    TimedValue,
)
from l2l_compile.estimate.segment_times import BackwardTimes, ForwardTimes, SegmentTimes
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.lowering.costs import typical_rates
from l2l_compile.lowering.savings import Savings
from l2l_compile.options import Options
from l2l_compile.runtime.fetch import unread
from l2l_compile.runtime.instructions import instructions_of
from l2l_compile.runtime.kept_activations import KeptLevels
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import Clocks, SimulatedEvent


class Timer(Protocol):
    """What the programs of a step share (`step_time.py`)."""

    options: Options
    machine: Machine
    clocks: Clocks
    device: Any
    lowering: TimedLowering
    host: HostTimes

    def on(self, lane: str) -> Any: ...

    def synchronize(self) -> None: ...


@dataclass(eq=False)
class _Step:
    """What `Slabs` and `unread` ask of a step."""

    rows: StepRows
    engine: Any
    to_train: bool = True


class ProgramTimer:
    """Times the graphs of one program."""

    def __init__(self, timer: Timer, number: int, program: Program, levels: Mapping[int, KeptLevels]):
        self.timer, self.number, self.program, self.levels = timer, number, program, levels
        self.clocks, self.machine, self.options, self.host = timer.clocks, timer.machine, timer.options, timer.host
        self.bindings, self.device = program.bindings, timer.device
        self.lanes = timer.device.lanes
        batch = program.captured.batch
        self.rows = StepRows(self.bindings, batch, self.options.micro_batches)
        self.savings = Savings(timer.lowering, self.options.block_compiler != "eager", typical_rates(self.options.device))
        self._engine = SimpleNamespace(check=None, lowering=timer.lowering, options=self.options)
        self.step: Any = None
        self.stashes: list[TimedValue] = []
        self.to_host: deque[SimulatedEvent] = deque()
        self.from_host: dict[int, ActivationsFromHostTimes] = {}
        self.handlers: dict[Callable, Callable[..., TimedValue]] = {
            nodes.fetch_weights: self._fetch_weights,
            nodes.fetch_resident: self._fetch_resident,
            nodes.keep_weights: lambda node, segment, weights: weights,
            nodes.restore: self._restore,
            nodes.recall: self._restore,
            nodes.offload: self._offload,
            nodes.write_back: self._write_back,
            nodes.stash: lambda node, x: x,
            nodes.split: self._split,
            nodes.merge: self._merge,
            nodes.blank: self._blank,
            operator.getitem: lambda node, results, index: results.results[index],
            nodes.accumulate: self._accumulate,
            nodes.release: self._release,
            nodes.forward: self._forward,
            nodes.backward: self._backward,
            nodes.keep_activations: lambda node, segment, results: results.results[-2],
            nodes.offload_activations: lambda node, segment, results: results.results[-1],
            nodes.restore_activations: self._restore_activations,
            nodes.push_gradients: self._push_gradients,
            nodes.update: self._update,
        }

    # ---- graphs -------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        self.step = _Step(self.rows, self._engine)
        inputs = [TimedValue([self._bytes(node)]) for node in self.program.forward.graph.find_nodes(op="placeholder")]
        outputs, self.stashes, _ = self._run(self.program.forward.graph, inputs, keep=self.program.backward is not None)
        for value in dict.fromkeys(output for output in outputs if output is not None and len(output.parts) > 1):
            self.clocks.spend(2 * sum(value.parts) / self.machine.host_bandwidth)  # joined for the caller

    def backward(self) -> None:
        if self.program.backward is None:
            return
        graph = self.program.backward.graph
        pushing = graph.find_nodes(op="call_function", target=nodes.push_gradients)
        self.host.begin_backward([self._trained(nodes.operands(node).segment) for node in pushing])
        given = graph.find_nodes(op="placeholder")[len(self.stashes) :]
        self._run(graph, [*self.stashes, *(TimedValue([self._bytes(node)]) for node in given)], keep=False)
        self.host.end_backward()

    def _run(self, graph: fx.Graph, inputs: Sequence[TimedValue], keep: bool) -> Any:
        instructions = instructions_of(graph, self.machine.overlaps)
        count = min(self.options.prefetch, 2 * len(self.program.segments)) + 1
        self.slabs = Slabs(self.device, self.step, count, instructions.fetches, keep)
        values = instructions.values(inputs)
        for instruction in instructions.nodes:
            node = instruction.node
            self.clocks.label = node.name
            self.clocks.spend(self.machine.node)
            handler = self.handlers.get(node.target)  # type: ignore[arg-type]
            if handler is None:
                raise OptionError(f"a step with nodes '{node.name}' is not timed by its nodes: simulate it")
            values[instruction.value] = handler(node, *instruction.operands(values))
        self._free_sent(0)
        if not keep:
            self.slabs.end()
        self.timer.synchronize()
        return instructions.output(values)

    def _bytes(self, node: fx.Node) -> int:
        spec = node.meta.get("spec")
        return spec.bytes(self.bindings) if spec is not None else 0

    def submit(self, lane: str, reads: Sequence[TimedValue], fills: Sequence[TimedValue], work: Callable[[], None]) -> None:
        """As `Executor.submit`."""
        queue = self.lanes[lane]
        for value in reads:
            if value.lane != lane and value.event is not None:
                queue.wait(value.event)
        with self.timer.on(lane):
            work()
        event = queue.record()
        for value in reads:
            value.readers[lane] = event
        for value in fills:
            value.lane, value.event = lane, event

    def compute(self, size: int, reads: Sequence[TimedValue], fills: Sequence[TimedValue], launches: int = 1) -> None:
        """Operations outside of blocks, which read and write so many bytes."""
        self.submit(Lane.COMPUTE, reads, fills, lambda: self.move(size, launches))

    def move(self, size: int, launches: int = 1) -> None:
        """Bytes that operations on the lane read and write."""
        if not size:
            return
        if self.machine.overlaps:
            self.clocks.queue(size / self.machine.kernel_bandwidth, launches)
        else:
            self.clocks.spend(size / self.machine.host_bandwidth)

    def copy(self, x: TimedValue, up: bool) -> None:
        """Copies of a value over the link (its lane); what its micro-batches share is copied once."""
        self.copies(list(dict.fromkeys(x.parts)) if x.equal else x.parts, up, x.pinned)

    def copies(self, parts: Sequence[int], up: bool, pinned: bool = True) -> None:
        """Copies over the link (its lane). New memory of the device may have belonged to a value that compute still reads."""
        if not self.machine.overlaps:
            return
        for size in parts:
            if up:
                self.lanes[Lane.H2D].wait(self.lanes[Lane.COMPUTE].record())
                self.host.upload(size, pinned)
            else:
                self.clocks.copy(size, self.machine.d2h, asynchronous=True)

    # ---- copies -------------------------------------------------------------------------------------------------------

    def _fetch_weights(self, node: fx.Node, segment: int, after: TimedValue | None = None) -> TimedValue:
        fetched = self.program.segments[segment]
        slab, kept = self.slabs.take(segment, may_stay=True)
        result = TimedValue(slab=slab)
        is_copied = kept is None
        result.unfetched = unread(self.step, node, self.program.segments) if is_copied else frozenset()
        if self.slabs.free[slab] is not None:
            self.lanes[Lane.H2D].wait(self.slabs.free[slab])

        def work() -> None:
            if is_copied:
                self.host.load(self.number, fetched, self.bindings, result.unfetched)

        self.submit(Lane.H2D, (), (result,), work)
        return result

    def _fetch_resident(self, node: fx.Node, segment: int, after: TimedValue | None = None) -> TimedValue:
        result, fetched = TimedValue(), self.program.segments[segment]
        self.submit(Lane.H2D, (), (result,), lambda: self.host.load(self.number, fetched, self.bindings, frozenset()))
        return result

    def _restore(self, node: fx.Node, x: TimedValue, turn: int | None = None) -> TimedValue:
        if x.absent:
            return TimedValue(absent=True)
        result = TimedValue(list(x.parts), equal=x.equal)
        self.submit(Lane.H2D, (x,), (result,), lambda: self.copy(x, up=True))
        return result

    def _offload(self, node: fx.Node, x: TimedValue) -> TimedValue:
        if x.absent:
            return TimedValue(absent=True)
        result = TimedValue(list(x.parts), pinned=True, equal=x.equal)
        self.submit(Lane.D2H, (x,), (result,), lambda: self.copy(x, up=False))
        return result

    def _write_back(self, node: fx.Node, input: int, contents: TimedValue) -> TimedValue:
        self.submit(Lane.D2H, (contents,), (), lambda: self.copies(contents.parts[:1], up=False))
        return TimedValue(absent=True)

    # ---- the layout of a value ----------------------------------------------------------------------------------------

    def _split(self, node: fx.Node, x: TimedValue) -> TimedValue:
        spec: TensorSpec = node.meta["spec"]
        parts = [math.prod(shape) * spec.dtype.itemsize for shape in self.rows.shapes(spec, is_split=True)]
        is_view = spec.batch is not None and spec.batch.dim == 0 or len(parts) == 1
        return self._changed(x, parts, 0 if is_view else 2 * sum(parts), len(parts))

    def _merge(self, node: fx.Node, x: TimedValue) -> TimedValue:
        spec: TensorSpec = node.meta["spec"]
        size = spec.bytes(self.bindings)
        if spec.batch is None:
            moved = (5 * len(x.parts) - 3) * size if spec.shape else 0
            return self._changed(x, [size], moved, 2 * len(x.parts) - 1)
        return self._changed(x, [size], 2 * size if len(x.parts) > 1 else 0, 1)

    def _changed(self, x: TimedValue, parts: list[int], moved: int, launches: int) -> TimedValue:
        if x.absent:
            return TimedValue(absent=True)
        result = TimedValue(parts)
        self.compute(moved, (x,), (result,), launches)
        return result

    def _blank(self, node: fx.Node) -> TimedValue:
        spec = node.meta["spec"]
        result = TimedValue([math.prod(shape) * spec.dtype.itemsize for shape in self.rows.shapes(spec, node.meta["split"])])
        self.compute(sum(result.parts), (), (result,), len(result.parts))
        return result

    def _accumulate(self, node: fx.Node, a: TimedValue, b: TimedValue) -> TimedValue:
        there = [x for x in (a, b) if not x.absent]
        if not there:
            return TimedValue(absent=True)
        result = TimedValue(list(there[0].parts))
        moved = 3 * sum(result.parts) if len(there) == 2 else 0
        self.compute(moved, there, (result,), len(result.parts))
        return result

    def _release(self, node: fx.Node, x: TimedValue) -> TimedValue:
        compute = self.lanes[Lane.COMPUTE]
        if x.absent:
            return x
        if x.lane != Lane.COMPUTE and x.event is not None:
            compute.wait(x.event)
        for lane, event in x.readers.items():
            if lane != Lane.COMPUTE:
                compute.wait(event)
        self.slabs.keeps(x)  # type: ignore[arg-type]  # a value in virtual time
        if x.slab is not None:
            self.slabs.free[x.slab] = compute.record()
        return x

    # ---- segments -----------------------------------------------------------------------------------------------------

    def _forward(
        self,
        node: fx.Node,
        segment: int,
        weights: TimedValue | None,
        values: Sequence[TimedValue],
        streamed_outputs: Sequence[int] = (),
        turn: int | None = None,
        wanted: Sequence[int] = (),
    ) -> TimedValue:
        ran = ForwardTimes(self, self.program.segments[segment], wanted)
        streams: list[Any] = []
        if streamed_outputs:
            streams.append(OutputTimes(self, [ran.results[i] for i in streamed_outputs]))
        if not ran.sent.absent:
            streams.append(ActivationsToHostTimes(self, ran.sent, ran.on_host))
        whole = [*(result for i, result in enumerate(ran.results) if i not in streamed_outputs), ran.kept]
        self._inner_loop(streams, ran, (weights, *values), whole)
        return TimedValue(results=[*ran.results, ran.kept, ran.sent])

    def _backward(
        self,
        node: fx.Node,
        segment: int,
        weights: TimedValue | None,
        values: Sequence[TimedValue],
        gradients: Sequence[TimedValue | None],
        streamed_gradients: Sequence[TimedValue | None] = (),
        activations: TimedValue | None = None,
        restored_activations: TimedValue | None = None,
        turn: int | None = None,
    ) -> TimedValue:
        part = self.program.segments[segment]
        streamed = {i: source for i, source in enumerate(streamed_gradients) if source is not None}
        arriving = [TimedValue(absent=i not in streamed) if g is None else g for i, g in enumerate(gradients)]
        returning = self.from_host.pop(segment, None)
        if all(g.absent for g in arriving):
            return TimedValue(results=[TimedValue(absent=True) for _ in range(len(part.values) + 1)])
        ran = BackwardTimes(self, part, arriving)
        streams: list[Any] = []
        if streamed:
            sources = [(source, part.block.outputs[i]) for i, source in streamed.items()]
            streams.append(GradientTimes(self, len(ran.lowered), sources))
        if returning is not None:
            streams.append(returning)
        self._inner_loop(streams, ran, (weights, *values, *arriving, activations), ran.results)
        return TimedValue(results=ran.results)

    def _inner_loop(
        self, streams: Sequence[Any], ran: SegmentTimes, read: Sequence[TimedValue | None], fills: Sequence[TimedValue]
    ) -> None:
        """As `_compute` of the executor, and `run_with`."""
        reads = [value for value in read if value is not None]
        if not streams:
            self.submit(Lane.COMPUTE, reads, fills, ran.inner_loop)
            return
        for number in range(len(ran.lowered)):
            for stream in streams:
                stream.before(number)
            self.submit(Lane.COMPUTE, reads, fills, functools.partial(ran.micro_batch, number))
            for stream in streams:
                stream.after(number)
        for stream in streams:
            stream.end()

    def _restore_activations(self, node: fx.Node, segment: int, x: TimedValue) -> TimedValue:
        if x.absent:
            return x
        result = TimedValue()
        self.from_host[segment] = ActivationsFromHostTimes(self, x, result)
        return result

    # ---- what goes to the host between micro-batches -------------------------------------------------------------------

    def send(self, parts: Sequence[int], target: TimedValue, ahead_of: int) -> None:
        """As `ActivationsToHost.send`."""
        d2h = self.lanes[Lane.D2H]
        d2h.wait(self.lanes[Lane.COMPUTE].record())
        with self.timer.on(Lane.D2H):
            self.copies(parts, up=False)
        target.lane, target.event = Lane.D2H, d2h.record()
        self.to_host.append(target.event)
        self._free_sent(ahead_of)

    def _free_sent(self, left: int) -> None:
        while len(self.to_host) > left:
            self.lanes[Lane.COMPUTE].wait(self.to_host.popleft())

    # ---- the host -----------------------------------------------------------------------------------------------------

    def _trained(self, segment: int) -> list[HostWeight]:
        ran = self.program.segments[segment]
        return [weight for weight in self.host.weights_of(self.number, ran, self.bindings) if weight.gradient]

    def _push_gradients(self, node: fx.Node, segment: int, gradients: TimedValue) -> TimedValue:
        result = TimedValue(absent=gradients.absent)
        if not result.absent:
            self.submit(Lane.D2H, (gradients,), (result,), lambda: self._push(gradients))
            self.host.collect(self._trained(segment), result.event)
        elif self.options.mode.is_overlapped:
            self.host.collect((), None)
        return result

    def _push(self, gradients: TimedValue) -> None:
        """Copy gradients into a buffer of the pool, also where the host is the device."""
        self.copies(gradients.parts, up=False)
        if not self.machine.overlaps:
            self.move(2 * sum(gradients.parts))

    def _update(self, node: fx.Node, segment: int, after: TimedValue | None = None) -> TimedValue:
        self.host.update(self._trained(segment))
        return TimedValue(absent=True)
