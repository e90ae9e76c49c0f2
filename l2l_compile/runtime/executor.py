"""Run a program graph on a device: one interpreter over the nodes of the vocabulary.

Each node is given to its lane, and the lane fills the node's `RuntimeValue`. A lane that reads a value filled by another lane
waits for that value's event. Memory is freed on the compute lane, after every lane that reads it.

A handler takes the operands of its node by the names that `ir/nodes.py` declares, with runtime values instead of nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from l2l_compile.devices.device import Device
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.races import Place
from l2l_compile.runtime.activation_copies import ActivationsFromHost, ActivationsToHost
from l2l_compile.runtime.instructions import Instruction, Instructions
from l2l_compile.runtime.messages import ArrivingParts, Leaving, LeavingParts, counts_of, finish_messages
from l2l_compile.runtime.out_of_memory import name_node
from l2l_compile.runtime.overlapped_copies import GradientStream, MicroBatchCopies, OutputStream, StreamedGradient, run_with
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of, copies
from l2l_compile.runtime.segment_run import kept_on_host, run_backward, run_forward, usable_savings
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.runtime.step import Step

Handler = Callable[..., RuntimeValue]
HANDLERS: dict[Callable, Handler] = {}


def handles(function: Callable) -> Callable[[Handler], Handler]:
    """The decorated function runs this node of the vocabulary: `handler(executor, node, *operands)`."""

    def register(handler: Handler) -> Handler:
        HANDLERS[function] = handler
        return handler

    return register


class Executor:
    """Runs the nodes of one graph for one step, all at once (`run`), or part by part (`go`). `inputs` fill the placeholders, in order."""

    def __init__(
        self,
        device: Device,
        step: Step,
        segments: Sequence[Segment],
        slabs: Slabs,
        instructions: Instructions,
        inputs: Sequence[RuntimeValue],
    ):
        self.device, self.step, self.segments, self.slabs = device, step, segments, slabs
        self.to_host = ActivationsToHost(device, step)
        self.from_host: dict[int, ActivationsFromHost] = {}  # by segment, until its backward
        self.released: dict[str, list[Place]] = {}  # by lane: released values of it, whose memory its next value may take
        self.instructions, self.values = instructions, instructions.values(inputs)
        self.leaving: Mapping[fx.Node, Sequence[fx.Node]] = instructions.leaving  # by segment that runs: messages of its results
        self.passing: Mapping[fx.Node, frozenset[int]] = instructions.passing  # by the same: results that nothing else reads
        self.left: set[fx.Node] = set()  # messages whose micro-batches have left as they were made
        self.outgoing: list[RuntimeValue] = []
        self.arriving: list[RuntimeValue] = []

    def run(self) -> Any:
        """Give every node to its lane. Returns the values of the output, in its structure. Does not wait for lanes."""
        self._go(self.instructions.nodes)
        return self.end()

    def go(self, part: str) -> None:
        """Give the nodes of one part of the step to their lanes."""
        span = self.instructions.parts[part]
        self._go(self.instructions.nodes[span.start : span.stop])

    def _go(self, instructions: Sequence[Instruction]) -> None:
        values, device, segments = self.values, self.device, self.segments
        for instruction in instructions:
            node = instruction.node
            device.begins(node, segments)
            device.accesses.begins(node.name)
            handler = HANDLERS[node.target]  # type: ignore[index]  # a call of the vocabulary
            try:
                values[instruction.value] = handler(self, node, *instruction.operands(values))
            except torch.OutOfMemoryError as error:
                name_node(error, node, segments)
                raise

    def pause(self) -> None:
        """Have lanes wait until all messages that were sent so far have left. Those that were asked for may still come."""
        for value in self.outgoing:
            finish_messages(self, value)
        self.outgoing = []

    def end(self) -> Any:
        """Have lanes wait for all that is under way. Returns the values of the output, in its structure."""
        self.to_host.free(0)
        for value in (*self.outgoing, *self.arriving):
            finish_messages(self, value)
            value.arrival = None
        return self.instructions.output(self.values)

    def early(self, node: fx.Node) -> RuntimeValue:
        """What a node makes of values that are there, before its turn."""
        instruction = next(each for each in self.instructions.nodes if each.node is node)
        return HANDLERS[node.target](self, node, *instruction.operands(self.values))  # type: ignore[index]  # as in `_go`

    def submit(self, lane: str, reads: Sequence[RuntimeValue], fills: Sequence[RuntimeValue], work: Callable[[], Any]) -> None:
        """Queue work on a lane, after the events of the values that it reads. The work fills the values `fills`."""
        queue = self.device.lanes[lane]
        for value in reads:
            if value.arrival is not None:
                value.arrival.complete(value)
            if value.lane != lane and value.event is not None:
                queue.wait(value.event)
        accesses = self.device.accesses
        queue.run(accesses.around(reads, fills, work) if accesses.watches else work)
        event = queue.record()
        for value in reads:
            if event is not None:
                value.readers[lane] = event
        for value in fills:
            value.lane, value.event = lane, event

    def submit_behind_releases(
        self, lane: str, reads: Sequence[RuntimeValue], fills: Sequence[RuntimeValue], work: Callable[[], Any]
    ) -> None:
        """Queue work that makes a value on another lane than compute, in memory that compute may have released before."""
        if (released := self.device.lanes[Lane.COMPUTE].record()) is not None:
            self.device.lanes[lane].wait(released)
        places = self.released.pop(lane, [])

        def take_and_work() -> None:
            for place in places:
                self.device.accesses.read(place)
            work()

        self.submit(lane, reads, fills, take_and_work)

    def change_layout(self, source: RuntimeValue, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> RuntimeValue:
        """Queue a change between the whole and the split layout of a value."""
        if source.absent:
            return RuntimeValue(absent=True)
        result = RuntimeValue()

        def work() -> None:
            result.tensors = change(source.tensors)
            self.device.hold(result.tensors)

        self.submit(Lane.COMPUTE, (source,), (result,), work)
        return result


# ---- copies -------------------------------------------------------------------------------------------------------------


@handles(nodes.restore)
def _restore(run: Executor, node: fx.Node, x: RuntimeValue, turn: int | None = None) -> RuntimeValue:
    if x.absent:
        return RuntimeValue(absent=True)
    result = RuntimeValue()

    def work() -> None:
        parts = x.tensors if turn is None else [run.step.rows.slice(x.tensors[0], node.meta["spec"], turn).contiguous()]
        result.tensors, copied = copies(parts, run.device.upload)
        run.device.hold(result.tensors)
        run.step.stats.restored_bytes += copied
        if x.is_loaded:
            x.tensors = None

    run.submit(Lane.H2D, (x,), (result,), work)
    return result


@handles(nodes.store)
def _store(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    size = run.step.stored.get(node)
    if x.absent or size is None:
        return x  # it is small, or no backward follows
    assert run.step.extent is not None and run.step.engine.stashes_on_disk is not None
    return run.step.engine.stashes_on_disk.put(x, size, run.step.extent, run.step.stats)


@handles(nodes.load)
def _load(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    if x.on_disk is None:
        return x
    assert run.step.engine.stashes_on_disk is not None
    return run.step.engine.stashes_on_disk.get(x, node.meta["spec"].bytes(run.step.rows.bindings), run.step.stats)


@handles(nodes.recall)
def _recall(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    result, spec, rows = RuntimeValue(), node.meta["spec"], run.step.rows
    (whole,) = x.tensors
    is_split = node.meta["split"]
    parts = [rows.slice(whole, spec, number) for number in range(len(rows.sizes))] if is_split else [whole]
    kept = run.step.engine.kept_inputs.take(whole, [part.shape for part in parts])

    def work() -> None:
        if kept is not None:
            result.tensors = kept
            return
        result.tensors, copied = copies(parts, run.device.upload)
        run.device.hold(result.tensors)
        run.step.stats.restored_bytes += copied

    run.submit(Lane.H2D, (x,), (result,), work)
    return result


@handles(nodes.keep_input)
def _keep_input(run: Executor, node: fx.Node, x: RuntimeValue, input: int) -> RuntimeValue:
    is_unchanged = nodes.operands(node).x.target is nodes.recall
    wanted = not is_unchanged or run.step.engine.kept_inputs.is_known(run.step.given[input])
    return _keep(run, node, x, input, wanted)


@handles(nodes.keep_output)
def _keep_output(run: Executor, node: fx.Node, x: RuntimeValue, output: int) -> RuntimeValue:
    return _keep(run, node, x, output, wanted=True)


def _keep(run: Executor, node: fx.Node, x: RuntimeValue, index: int, wanted: bool) -> RuntimeValue:
    """Keep a value until the end of the call, when the tensor that it belongs to is known; or release it now."""
    size = nodes.operands(node).x.meta["spec"].bytes(run.step.rows.bindings)
    if not wanted or not run.step.engine.kept_inputs.admits(size):
        return _release(run, node, x)
    run.step.keeps[node.target, index] = x, size  # type: ignore[index]  # a call of the vocabulary
    return x


@handles(nodes.offload)
def _offload(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    if x.absent:
        return RuntimeValue(absent=True)
    result = RuntimeValue()

    def work() -> None:
        result.tensors, copied = copies(x.tensors, run.device.download)
        run.step.stats.offloaded_bytes += copied

    run.submit(Lane.D2H, (x,), (result,), work)
    return result


@handles(nodes.write_back)
def _write_back(run: Executor, node: fx.Node, input: int, contents: RuntimeValue) -> RuntimeValue:
    def work() -> None:
        run.device.accesses.write(run.step.place)
        run.step.writes[input] = run.device.download(contents.tensors[0])

    run.submit(Lane.D2H, (contents,), (), work)
    return RuntimeValue(absent=True)


@handles(nodes.begin)
def _begin(run: Executor, node: fx.Node, turn: str) -> RuntimeValue:
    return RuntimeValue(absent=True)


# ---- the layout of a value ----------------------------------------------------------------------------------------------


@handles(nodes.stash)
def _stash(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    return x


@handles(nodes.split)
def _split(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    return run.change_layout(x, lambda tensors: run.step.rows.split(tensors[0], node.meta["spec"]))


@handles(nodes.merge)
def _merge(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    spec: TensorSpec = node.meta["spec"]
    if spec.batch is None:
        return run.change_layout(x, lambda parts: [run.step.rows.summed(parts, spec.partial)])
    return run.change_layout(x, lambda parts: [torch.cat(parts, spec.rows.dim) if len(parts) > 1 else parts[0]])


@handles(nodes.join)
def _join(run: Executor, node: fx.Node, parts: Sequence[RuntimeValue]) -> RuntimeValue:
    result, there = RuntimeValue(), [part for part in parts if not part.absent]
    if not there:
        return RuntimeValue(absent=True)

    def work() -> None:
        result.tensors = [tensor for part in there for tensor in part.tensors]
        run.device.hold(result.tensors)

    run.submit(Lane.COMPUTE, there, (result,), work)
    return result


@handles(nodes.blank)
def _blank(run: Executor, node: fx.Node) -> RuntimeValue:
    result, spec = RuntimeValue(), node.meta["spec"]
    shapes = run.step.rows.shapes(spec, node.meta["split"])

    def work() -> None:
        result.tensors = [torch.zeros(shape, dtype=spec.dtype, device=run.device.torch_device) for shape in shapes]
        run.device.hold(result.tensors)

    run.submit(Lane.COMPUTE, (), (result,), work)
    return result


@handles(operator.getitem)
def _getitem(run: Executor, node: fx.Node, results: RuntimeValue, index: int) -> RuntimeValue:
    return results.results[index]


@handles(nodes.accumulate)
def _accumulate(run: Executor, node: fx.Node, a: RuntimeValue, b: RuntimeValue) -> RuntimeValue:
    there = [x for x in (a, b) if not x.absent]
    if not there:
        return RuntimeValue(absent=True)
    result = RuntimeValue()

    def work() -> None:
        if len(there) == 2:
            result.tensors = [torch.add(x, y) for x, y in zip(a.tensors, b.tensors, strict=True)]
        else:
            result.tensors = there[0].tensors
        run.device.hold(result.tensors)

    run.submit(Lane.COMPUTE, there, (result,), work)
    return result


@handles(nodes.release)
def _release(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    compute = run.device.lanes[Lane.COMPUTE]
    if x.absent:
        return x
    finish_messages(run, x)
    if x.lane != Lane.COMPUTE and x.event is not None:
        compute.wait(x.event)
    for lane, event in x.readers.items():
        if lane != Lane.COMPUTE:
            compute.wait(event)

    kept = run.slabs.keeps(x)

    def work() -> None:
        run.device.accesses.write(x.place)
        if kept is not None:
            kept.tensors = x.tensors
        elif x.resident is None:
            run.device.free(x.held)
        x.tensors = None

    compute.run(work)
    _give_back(run, x)
    return x


def _give_back(run: Executor, x: RuntimeValue) -> None:
    """The memory of a value that is released may be written again, behind what compute has got so far."""
    if x.slab is not None:
        run.slabs.free[x.slab] = run.device.lanes[Lane.COMPUTE].record()
    elif x.set_apart is not None:
        run.step.engine.set_apart.give(x.set_apart)
        x.set_apart = None
    elif x.lane in (Lane.COMM, Lane.RECV):
        run.released.setdefault(x.lane, []).append(x.place)


# ---- segments -----------------------------------------------------------------------------------------------------------


@handles(nodes.forward)
def _forward(
    run: Executor,
    node: fx.Node,
    segment: int,
    weights: RuntimeValue | None,
    values: Sequence[RuntimeValue],
    streamed_outputs: Sequence[int] = (),
    turn: int | None = None,
    wanted: Sequence[int] = (),
) -> RuntimeValue:
    ran = run.segments[segment]
    weights = weights if weights is not None else RuntimeValue([])
    kept, sent = _for_activations(run, segment)
    results = [*(RuntimeValue() for _ in ran.block.outputs), kept, sent]
    inner_loop = run_forward(run.step, run.device, ran, weights, values, results, turn, wanted)
    streams: list[MicroBatchCopies] = []
    if streamed_outputs:
        streams.append(OutputStream(run.device, run.step, [results[i] for i in streamed_outputs]))
    if not sent.absent:
        streams.append(run.to_host.stream(kept_on_host(run.step, segment), sent))
    streams += _leaving(run, node, results)
    whole = [result for i, result in enumerate(results) if i not in streamed_outputs and result is not sent]
    _compute(run, streams, inner_loop, (weights, *values), whole)
    return RuntimeValue(results=results)


def _for_activations(run: Executor, segment: int) -> tuple[RuntimeValue, RuntimeValue]:
    """Values for what a segment keeps on the device, and on the host."""
    levels = run.step.levels.get(segment)
    parts, there = levels.parts if levels is not None else (), kept_on_host(run.step, segment)
    kept = RuntimeValue(absent=len(there) == sum(part is not None for part in parts))
    sent = RuntimeValue(_for_each(parts), absent=not there, results=[RuntimeValue() for _ in parts])
    return kept, sent


def _for_each(micro_batches: Sequence) -> list[Any]:
    """Places for the tensors of each micro-batch."""
    return [None] * len(micro_batches)


def _compute(
    run: Executor,
    streams: Sequence[MicroBatchCopies],
    inner_loop: Sequence[Callable[[], None]],
    reads: Sequence[RuntimeValue],
    fills: Sequence[RuntimeValue],
) -> None:
    arriving = [value for value in reads if value.arrival is not None]
    if arriving:
        reads = [value for value in reads if value.arrival is None]
        streams = [*streams, ArrivingParts(arriving, ahead=1 if run.step.engine.check and len(inner_loop) > 1 else 0)]
    if streams:
        run_with(streams, run.submit, inner_loop, reads, fills)
    else:
        run.submit(Lane.COMPUTE, reads, fills, lambda: [work() for work in inner_loop])


def _leaving(run: Executor, node: fx.Node, results: Sequence[RuntimeValue]) -> list[MicroBatchCopies]:
    """The copies of results of a segment to other ranks."""
    found = []
    passing = [results[i] for i in run.passing.get(node, ()) if not results[i].absent]
    for message in run.leaving.get(node, ()):
        read = nodes.operands(message)
        split = {value: results[nodes.operands(value).index] for value in read.values if value.meta["split"]}
        there = [value for value, result in split.items() if not result.absent]
        if there:
            leaving = [split[value] for value in there]
            found.append(Leaving(read.to, leaving, counts_of(run.step, there)))
            run.left.add(message)
            run.outgoing += leaving
    return [LeavingParts(run, found, passing)] if found else []


@handles(nodes.keep_activations)
def _keep_activations(run: Executor, node: fx.Node, segment: int, results: RuntimeValue) -> RuntimeValue:
    return results.results[-2]


@handles(nodes.offload_activations)
def _offload_activations(run: Executor, node: fx.Node, segment: int, results: RuntimeValue) -> RuntimeValue:
    return results.results[-1]


@handles(nodes.restore_activations)
def _restore_activations(run: Executor, node: fx.Node, segment: int, x: RuntimeValue) -> RuntimeValue:
    if x.absent:
        return x
    result = RuntimeValue(_for_each(x.tensors))
    run.from_host[segment] = ActivationsFromHost(run.device, run.step, kept_on_host(run.step, segment), x, result)
    return result


@handles(nodes.backward)
def _backward(
    run: Executor,
    node: fx.Node,
    segment: int,
    weights: RuntimeValue | None,
    values: Sequence[RuntimeValue],
    gradients: Sequence[RuntimeValue | None],
    streamed_gradients: Sequence[RuntimeValue | None] = (),
    activations: RuntimeValue | None = None,
    restored_activations: RuntimeValue | None = None,
    turn: int | None = None,
) -> RuntimeValue:
    ran = run.segments[segment]
    weights = weights if weights is not None else RuntimeValue([])
    streamed = {i: source for i, source in enumerate(streamed_gradients) if source is not None}
    arriving = [RuntimeValue(absent=g is None and i not in streamed) if g is None else g for i, g in enumerate(gradients)]
    results = [RuntimeValue(absent=True) for _ in range(len(ran.values) + 1)]
    if not all(g.absent for g in arriving):
        kept = activations or RuntimeValue(absent=True)
        both = kept, restored_activations or RuntimeValue(absent=True)
        passing = run.passing.get(node, frozenset())
        inner_loop = run_backward(run.step, run.device, ran, weights, values, arriving, both, results, passing, turn)
        streams: list[MicroBatchCopies] = []
        if streamed:
            sources = [StreamedGradient(source, arriving[i], ran.block.outputs[i]) for i, source in streamed.items()]
            streams.append(GradientStream(run.device, run.step, len(inner_loop), sources))
        returning = run.from_host.pop(segment, None)
        if returning is not None and usable_savings(run.step, segment, tuple(not g.absent for g in arriving)):
            streams.append(returning)
        streams += _leaving(run, node, results)
        _compute(run, streams, inner_loop, (weights, *values, *arriving, kept), results)
    return RuntimeValue(results=results)


# ---- the host -----------------------------------------------------------------------------------------------------------


@handles(nodes.push_gradients)
def _push_gradients(run: Executor, node: fx.Node, segment: int, gradients: RuntimeValue) -> RuntimeValue:
    result = RuntimeValue(absent=gradients.absent)

    def work() -> None:
        pushed = run.device.push([g for g in gradients.tensors if g is not None])
        run.step.stats.pushed_bytes += bytes_of(pushed)
        there = iter(pushed)
        result.tensors = [g if g is None else next(there) for g in gradients.tensors]

    if not result.absent:
        run.submit(Lane.D2H, (gradients,), (result,), work)
    if run.step.pushed is not None:
        run.step.pushed.append((run.segments[segment], result))
    else:
        run.step.engine.server.collect(run.step, run.segments[segment], result)
    return result


@handles(nodes.update)
def _update(run: Executor, node: fx.Node, segment: int, after: RuntimeValue | None = None) -> RuntimeValue:
    run.step.engine.server.update(run.step, run.segments[segment], after)
    return RuntimeValue(absent=True)
