"""The times of one run of a program graph: each node gives its work to the clocks of its lane, with the waits of `runtime/executor.py`."""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from l2l_compile.errors import OptionError
from l2l_compile.estimate import change_times, collective_times, message_times
from l2l_compile.estimate.block_seconds import TimedLowering
from l2l_compile.estimate.host_times import HostTimes, HostWeight
from l2l_compile.estimate.message_times import ArrivingTimes, finish_messages, leaving_results
from l2l_compile.estimate.overlapped_times import (
    ActivationsFromHostTimes,
    ActivationsToHostTimes,
    GradientTimes,
    OutputTimes,
    TimedValue,
)
from l2l_compile.estimate.rank_links import RankLinks
from l2l_compile.estimate.segment_times import BackwardTimes, ForwardTimes, SegmentTimes
from l2l_compile.estimate.stash_times import StashTimes
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.lowering.savings import Savings
from l2l_compile.options import Options
from l2l_compile.runtime.fetch import unread
from l2l_compile.runtime.instructions import Instruction, instructions_of
from l2l_compile.runtime.kept_activations import KeptLevels
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import Ring
from l2l_compile.simulation.simulated_device import Clocks, SimulatedEvent
from l2l_compile.simulation.simulated_pipeline import SimulatedPipeline


class Timer(Protocol):
    """What the programs of a step share (`step_time.py`)."""

    options: Options
    machine: Machine
    clocks: Clocks
    device: Any
    lowering: TimedLowering
    host: HostTimes
    links: RankLinks
    stashes: StashTimes

    def on(self, lane: str) -> Any: ...

    def synchronize(self) -> None: ...


@dataclass(eq=False)
class TimedStep:
    """What `Slabs`, `unread` and `absent_gradients` ask of a step."""

    rows: StepRows
    engine: Any
    to_train: bool = True


@dataclass(frozen=True, eq=False)
class ProgramSetting:
    """A program, and what all runs of its graphs have in common.

    number    among the programs of the step
    levels    what segments keep for backward
    stored    the bytes of the stashes that go to the disk, by their `store` nodes
    by_turns  whether a step goes forward and back turn by turn
    """

    timer: Timer
    number: int
    program: Program
    levels: Mapping[int, KeptLevels]
    stored: Mapping[fx.Node, int]
    rows: StepRows
    savings: Savings
    step: Any
    by_turns: bool
    absent: frozenset[tuple[int, str]]


class GraphTimer:
    """Times one run of a graph, all at once (`run`), or part by part (`go`). `inputs` fill the placeholders, in order.

    keep     whether the last weights stay in their slabs, for a backward
    channel  of its messages: those of two steps in flight are apart
    pushed   of turns: the gradients that wait until the loss is differentiated; None once they need not
    of_step  the step that its gradients belong to, on the host; None for the present one
    is_over  of a step without a flush, whether all of its turns are back
    """

    def __init__(self, of: ProgramSetting, graph: fx.Graph, inputs: Sequence[TimedValue], keep: bool = False, channel: int = 0):
        self.of, self.timer, self.number, self.program, self.levels = of, of.timer, of.number, of.program, of.levels
        self.clocks, self.machine, self.options = of.timer.clocks, of.timer.machine, of.timer.options
        self.host, self.device, self.lanes = of.timer.host, of.timer.device, of.timer.device.lanes
        self.bindings, self.rows, self.savings, self.step = of.program.bindings, of.rows, of.savings, of.step
        self.absent, self.channel = of.absent, channel
        self.instructions = instructions_of(graph, self.machine.overlaps)
        self.values, self.keep = self.instructions.values(inputs), keep
        count = min(self.options.prefetch, 2 * len(self.program.segments)) + 1
        self.slabs = Slabs(self.device, self.step, count, self.instructions.fetches, keep)
        self.sums: dict[int, dict[int, tuple[int, torch.dtype]]] = {}
        self.pushed: list[tuple[int, TimedValue]] | None = [] if of.by_turns else None
        self.of_step: Any = None
        self.is_over = False
        self.left: set[fx.Node] = set()
        self.outgoing: list[TimedValue] = []
        self.arriving: list[TimedValue] = []
        self.to_host: deque[SimulatedEvent] = deque()
        self.from_host: dict[int, ActivationsFromHostTimes] = {}
        self.handlers: dict[Callable, Callable[..., TimedValue]] = {
            nodes.fetch_weights: self._fetch_weights,
            nodes.fetch_resident: self._fetch_resident,
            nodes.keep_weights: lambda node, segment, weights: weights,
            nodes.restore: self._restore,
            nodes.recall: self._restore,
            nodes.offload: self._offload,
            nodes.store: self._store,
            nodes.load: self._load,
            nodes.write_back: self._write_back,
            nodes.stash: lambda node, x: x,
            nodes.split: functools.partial(change_times.split, self),
            nodes.merge: functools.partial(change_times.merge, self),
            nodes.blank: functools.partial(change_times.blank, self),
            operator.getitem: lambda node, results, index: results.results[index],
            nodes.accumulate: functools.partial(change_times.accumulate, self),
            nodes.release: self._release,
            nodes.forward: self._forward,
            nodes.backward: self._backward,
            nodes.keep_activations: lambda node, segment, results: results.results[-2],
            nodes.offload_activations: lambda node, segment, results: results.results[-1],
            nodes.restore_activations: self._restore_activations,
            nodes.push_gradients: self._push_gradients,
            nodes.update: self._update,
            nodes.begin: lambda node, turn: TimedValue(absent=True),
            nodes.join: functools.partial(change_times.join, self),
            nodes.all_gather_weights: functools.partial(collective_times.all_gather_weights, self),
            nodes.reduce_scatter_gradients: functools.partial(collective_times.reduce_scatter_gradients, self),
            nodes.send: functools.partial(message_times.send, self),
            nodes.recv: functools.partial(message_times.recv, self),
        }

    @property
    def ring(self) -> Ring:
        """The ranks over which the parameters are sharded."""
        assert self.timer.links.ring is not None, "only shards have collectives"
        return self.timer.links.ring

    @property
    def pipeline(self) -> SimulatedPipeline:
        """The ranks of the pipeline."""
        assert self.timer.links.pipeline is not None, "only a pipeline has messages"
        return self.timer.links.pipeline

    @property
    def takes_norms(self) -> bool:
        """Whether the device takes the norms of gradients now: not if they still change, as a mean over replicas or with the loss of turns."""
        are_final = self.timer.links.of_replicas is None and self.pushed is None
        return self.options.mode.is_overlapped and self.machine.overlaps and are_final

    # ---- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Time all nodes, until all lanes are idle. Returns the values of the output, in its structure."""
        self._go(self.instructions.nodes)
        self.end()
        if not self.keep:
            self.slabs.end()
        self.timer.synchronize()
        return self.instructions.output(self.values)

    def go(self, part: str) -> None:
        """Time the nodes of one part of a step by turns."""
        span = self.instructions.parts[part]
        self._go(self.instructions.nodes[span.start : span.stop])

    def _go(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            node = instruction.node
            self.clocks.label = node.name
            self.clocks.spend(self.machine.node)
            handler = self.handlers.get(node.target)  # type: ignore[arg-type]
            if handler is None:
                raise OptionError(f"a step with nodes '{node.name}' is not timed by its nodes: simulate it")
            self.values[instruction.value] = handler(node, *instruction.operands(self.values))

    def pause(self) -> None:
        """As `Executor.pause`."""
        for value in self.outgoing:
            finish_messages(self, value)
        self.outgoing = []

    def end(self) -> None:
        """As `Executor.end`."""
        self._free_sent(0)
        for value in (*self.outgoing, *self.arriving):
            finish_messages(self, value)
            value.arrival = None
        self.outgoing, self.arriving = [], []

    def submit(self, lane: str, reads: Sequence[TimedValue], fills: Sequence[TimedValue], work: Callable[[], None]) -> None:
        """As `Executor.submit`."""
        queue = self.lanes[lane]
        for value in reads:
            if value.arrival is not None:
                value.arrival.complete(value)
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
        slab, kept = self.slabs.take(segment, may_stay=not fetched.sharded)
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
        if turn is not None:  # one micro-batch of it
            result = TimedValue(self._shapes_of(node, turn))
            self.submit(Lane.H2D, (x,), (result,), lambda: self._restore_part(x, result))
            return result
        self.submit(Lane.H2D, (x,), (result,), lambda: self.copy(x, up=True))
        return result

    def _restore_part(self, x: TimedValue, part: TimedValue) -> None:
        self.copies(part.parts, up=True, pinned=x.pinned)

    def _shapes_of(self, node: fx.Node, turn: int | None = None) -> list[int]:
        """Bytes of the micro-batches of a value, or of that of a turn."""
        spec: TensorSpec = node.meta["spec"]
        is_split = node.meta["split"] or turn is not None
        return [math.prod(shape) * spec.dtype.itemsize for shape in self.rows.shapes(spec, is_split, turn)]

    def _offload(self, node: fx.Node, x: TimedValue) -> TimedValue:
        if x.absent:
            return TimedValue(absent=True)
        result = TimedValue(list(x.parts), pinned=True, equal=x.equal)
        self.submit(Lane.D2H, (x,), (result,), lambda: self.copy(x, up=False))
        return result

    def _store(self, node: fx.Node, x: TimedValue) -> TimedValue:
        size = self.of.stored.get(node)
        return x if x.absent or size is None else self.timer.stashes.put(x, size)

    def _load(self, node: fx.Node, x: TimedValue) -> TimedValue:
        return x if x.written is None else self.timer.stashes.get(x, node.meta["spec"].bytes(self.bindings))

    def _write_back(self, node: fx.Node, input: int, contents: TimedValue) -> TimedValue:
        self.submit(Lane.D2H, (contents,), (), lambda: self.copies(contents.parts[:1], up=False))
        return TimedValue(absent=True)

    def _release(self, node: fx.Node, x: TimedValue) -> TimedValue:
        compute = self.lanes[Lane.COMPUTE]
        if x.absent:
            return x
        finish_messages(self, x)
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
        ran = ForwardTimes(self, self.program.segments[segment], wanted, turn)
        streams: list[Any] = []
        if streamed_outputs:
            streams.append(OutputTimes(self, [ran.results[i] for i in streamed_outputs]))
        if not ran.sent.absent:
            streams.append(ActivationsToHostTimes(self, ran.sent, ran.on_host))
        streams += self._leaving(node, ran.results)
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
        ran = BackwardTimes(self, part, arriving, turn)
        streams: list[Any] = []
        if streamed:
            sources = [(source, part.block.outputs[i]) for i, source in streamed.items()]
            streams.append(GradientTimes(self, ran.count, sources))
        if returning is not None:
            streams.append(returning)
        streams += self._leaving(node, ran.results)
        self._inner_loop(streams, ran, (weights, *values, *arriving, activations), ran.results)
        return TimedValue(results=ran.results)

    def _inner_loop(
        self, streams: Sequence[Any], ran: SegmentTimes, read: Sequence[TimedValue | None], fills: Sequence[TimedValue]
    ) -> None:
        """As `_compute` of the executor, and `run_with`."""
        reads = [value for value in read if value is not None]
        if arriving := [value for value in reads if value.arrival is not None]:
            reads = [value for value in reads if value.arrival is None]
            streams = [*streams, ArrivingTimes(self, arriving)]
        if not streams:
            self.submit(Lane.COMPUTE, reads, fills, ran.inner_loop)
            return
        for number in ran.numbers:
            for stream in streams:
                stream.before(number)
            self.submit(Lane.COMPUTE, reads, fills, functools.partial(ran.micro_batch, number))
            for stream in streams:
                stream.after(number)
        for stream in streams:
            stream.end()

    def _leaving(self, node: fx.Node, results: Sequence[TimedValue]) -> list[Any]:
        leaving, passing = self.instructions.leaving.get(node, ()), self.instructions.passing.get(node, ())
        return leaving_results(self, leaving, results, sorted(passing))

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

    def trained(self, segment: int) -> list[HostWeight]:
        """The weights of a segment that get gradients, on the host."""
        ran = self.program.segments[segment]
        return [weight for weight in self.host.weights_of(self.number, ran, self.bindings) if weight.gradient]

    def _push_gradients(self, node: fx.Node, segment: int, gradients: TimedValue) -> TimedValue:
        result = TimedValue(absent=gradients.absent, has_norms=gradients.has_norms)
        if not result.absent:
            self.submit(Lane.D2H, (gradients,), (result,), lambda: self._push(gradients))
        if self.pushed is not None:
            self.pushed.append((segment, result))
        else:
            self.collect(segment, result)
        return result

    def collect(self, segment: int, pushed: TimedValue) -> None:
        """Give the gradients of a segment to the host."""
        if not pushed.absent:
            self.host.collect(self.trained(segment), pushed.event, pushed.has_norms, self.of_step)
        elif self.options.mode.is_overlapped:
            self.host.collect((), None, of_step=self.of_step)

    def _push(self, gradients: TimedValue) -> None:
        """Copy gradients into a buffer of the pool, also where the host is the device."""
        self.copies(gradients.parts, up=False)
        if not self.machine.overlaps:
            self.move(2 * sum(gradients.parts))

    def _update(self, node: fx.Node, segment: int, after: TimedValue | None = None) -> TimedValue:
        self.host.update(self.trained(segment))
        return TimedValue(absent=True)
