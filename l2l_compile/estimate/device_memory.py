"""The device memory that a program needs, before anything runs: one more interpreter over program nodes, on sizes alone.

It counts like `stats().peak_device_bytes`: values while the program holds them, and within a block the results of its
operations, each by itself. Where the layers run on the host, weights count from fetch to release. A device with memory of its own
has `prefetch` + 1 weight slabs in the whole step, each of the size of the largest segment. A GPU's allocator rounds up, and
kernels may need work space. On a machine without the device, blocks are traced for the host, whose kernels may hold more.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from l2l_compile.devices.device import LinkRates
from l2l_compile.devices.host import is_host, own_memory
from l2l_compile.devices.registry import is_absent, kind_of, traced_on
from l2l_compile.estimate.host_memory import host_memory
from l2l_compile.estimate.resident_on_sizes import CallMemory, StayingWeights, resident_on_sizes
from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import passes_on
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment, block_bindings, micro_batch_sizes
from l2l_compile.ir.step_parts import Run, calls_in_a_row, pauses
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.lowering.costs import Rates, typical_rates
from l2l_compile.lowering.lower import Lowering
from l2l_compile.lowering.savings import Saving, Savings
from l2l_compile.options import AUTO, Options
from l2l_compile.runtime.activation_copies import ahead
from l2l_compile.runtime.activation_room import OF_THE_HOST, SPARE, Traffic, room_on_host
from l2l_compile.runtime.kept_activations import KeptLevels, KeptPart, Room, kept_levels, masks_of
from l2l_compile.runtime.micro_batches import MicroBatches
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.simulation.machine import Machine
from l2l_compile.units import format_bytes

WEIGHTS, STASHES, ACTIVATIONS, GRADIENTS = "weights", "stashes", "activations", "gradients"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device at the moment of a step when it holds most, by purpose.

    weights      of the segments that are fetched; on a device with memory of its own, the weight slabs, and those that stay
    stashes      values that are kept for backward, or were restored for it; with the option `keep`, also from inside of layers
    activations  other values, and results of the operations of the running block
    gradients    of values and of weights
    grows        the kinds of memory that grow with the number of layers, and why; empty if none does
    staying      the weights that stay from call to call without gradients; None in training, and where none may stay
    """

    weights: int
    stashes: int
    activations: int
    gradients: int
    grows: tuple[str, ...] = ()
    staying: StayingWeights | None = None

    @property
    def peak(self) -> int:
        return self.weights + self.stashes + self.activations + self.gradients

    def __str__(self) -> str:
        parts = ((WEIGHTS, self.weights), (STASHES, self.stashes), (ACTIVATIONS, self.activations), (GRADIENTS, self.gradients))
        shown = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts)
        line = f"device memory at its peak: {format_bytes(self.peak)} ({shown})"
        lines = [f"{line}; of it grows with depth:", *(f"  {what}" for what in self.grows)]
        if not self.grows:
            lines = [f"{line}; of it grows with depth: 0 B"]
        return "\n".join([*lines, str(self.staying)] if self.staying is not None else lines)


StepLevels = Sequence[Mapping[int, KeptLevels]]  # for each program, what its segments keep for backward


def device_memory(
    programs: Sequence[Program], options: Options, machine: Machine | None = None, levels: StepLevels | None = None
) -> DeviceMemory:
    """The expected peak of one step through these programs. Raises `LoweringError` for a block that cannot be traced.

    On a `machine`, keep="auto" is what is free there. `levels` is what `levels_of_step` says of the same step, if it is known.
    """
    runs, staying = _runs(programs, options, machine, levels)
    peak = max((run.peak for run in runs), key=lambda peak: sum(peak.values()), default=Counter())
    grows = [*(str(u) for p in programs for u in p.uncut), *(line for run in runs for line in run.growth())]
    return DeviceMemory(peak[WEIGHTS], peak[STASHES], peak[ACTIVATIONS], peak[GRADIENTS], tuple(dict.fromkeys(grows)), staying)


def samples(
    programs: Sequence[Program], options: Options, machine: Machine | None = None, levels: StepLevels | None = None
) -> list[list[tuple[fx.Node, Counter[str]]]]:
    """For each program, the bytes that each kind is expected to take at the nodes of a step, in their order."""
    runs, _ = _runs(programs, options, machine, levels)
    return [run.samples for run in runs]


def savings_for(options: Options, rates: Rates | None = None) -> Savings:
    """What blocks may save: by default by the typical rates of the device, as a run decides, which does not know its machine."""
    lowering = Lowering(traced_on(options.device), "eager", is_absent(options.device))
    return Savings(lowering, options.block_compiler != "eager", rates or typical_rates(options.device))


def room_of(programs: Sequence[Program], options: Options, machine: Machine | None) -> Room:
    """Bytes that `keep` and `keep_on_host` allow for a step; 0 where "auto" is known after the first steps on the device alone."""
    return Room(_room_of_device(programs, options, machine), _room_of_host(programs, options, machine))


def _room_of_device(programs: Sequence[Program], options: Options, machine: Machine | None) -> int:
    if options.keep != AUTO:
        return int(options.keep)
    if is_host(options.device):
        return int(own_memory() * OF_THE_HOST)
    if machine is None:
        return 0
    peak = device_memory(programs, replace(options, keep=0, keep_on_host=0)).peak
    return max(0, int(machine.device_room - peak - SPARE * machine.device_memory))


def _runs(
    programs: Sequence[Program], options: Options, machine: Machine | None, levels: StepLevels | None
) -> tuple[list[_DryRun], StayingWeights | None]:
    """A step through these programs, and the weights that stay on the device meanwhile."""
    lowering, slabs = Lowering(traced_on(options.device), "eager", is_absent(options.device)), _slabs(programs, options)
    savings = savings_for(options)
    levels = levels if levels is not None else levels_of_step(programs, options, machine, savings)
    limit = _limit_of_cache(options, slabs, machine)
    runs = [_DryRun(p, options, lowering, slabs, savings, kept, limit) for p, kept in zip(programs, levels, strict=True)]
    for run in runs:
        run.step()
    staying = _staying(runs, options, machine)
    for run in runs:
        run.add_weights(staying.bytes if staying is not None else 0)
    return runs, staying


def _limit_of_cache(options: Options, slabs: int | None, machine: Machine | None) -> int | None:
    """Bytes of inputs that may stay on the device from call to call, as `runtime/kept_inputs.py` finds them; None for no bound."""
    if options.device_cache is not None or machine is None or slabs is None:
        return options.device_cache
    return machine.device_room - slabs - int(machine.device_memory) // 5


def _staying(runs: Sequence[_DryRun], options: Options, machine: Machine | None) -> StayingWeights | None:
    """The weights that stay from call to call: of calls without gradients, on a device with memory of its own, on one rank."""
    is_alone = all(run.program.backward is None and run.captured.mesh is None for run in runs)
    slabs = runs[0].slabs if runs else None
    if slabs is None or options.resident == 0 or not is_alone:
        return None
    calls = [CallMemory(run.without_weights, run.kept) for run in runs]
    return resident_on_sizes([run.program for run in runs], calls, slabs, options.resident, machine)


def _room_of_host(programs: Sequence[Program], options: Options, machine: Machine | None) -> int:
    """With "auto", what the link carries while the device computes, in the half of what is left of the host's memory."""
    if options.keep_on_host != AUTO:
        return int(options.keep_on_host)
    if machine is None or not machine.overlaps:
        return 0
    traffic = _traffic(programs, options, machine)
    free = machine.host_room - host_memory(programs, options).total
    return max(0, int(min(traffic.room(LinkRates(machine.h2d, machine.d2h)), free * OF_THE_HOST)))


def room_by_time(programs: Sequence[Program], options: Options, machine: Machine, forward: float, backward: float) -> int:
    """Bytes that `keep_on_host="auto"` gives a step whose forward and backward take so many seconds while nothing is kept on the host.

    A run measures these seconds. They are longer than the work of the device where it waits: for other ranks, or for the link.
    """
    nothing = replace(options, keep_on_host=0)
    traffic = replace(_traffic(programs, nothing, machine), forward_seconds=forward, backward_seconds=backward)
    free = machine.host_room - host_memory(programs, nothing).total
    return room_on_host(traffic.room(LinkRates(machine.h2d, machine.d2h)), free)


def _traffic(programs: Sequence[Program], options: Options, machine: Machine) -> Traffic:
    """Seconds and copies of a step that keeps nothing on the host, where blocks may save."""
    savings, forward, backward, fetched, stashed = savings_for(options, machine), 0.0, 0.0, 0, 0
    for program in programs:
        stashed += sum(program.host_stashes.values()) + sum(program.disk_stashes.values())
        fetched += sum(s.block.weight_bytes(program.bindings) for s in program.streamed)
        for index, mask in masks_of(program).items():
            segment = program.segments[index]
            for bindings in runs_of(program, segment, options.micro_batches):
                seconds = savings.seconds(segment.block, bindings, mask)
                forward += seconds.forward
                backward += seconds.backward + seconds.recompute
    return Traffic(forward, backward, fetched + stashed, stashed)


def levels_of_step(
    programs: Sequence[Program], options: Options, machine: Machine | None, savings: Savings | None = None
) -> StepLevels:
    """For each program, what its segments keep for backward: the first program takes what it can."""
    room, found = room_of(programs, options, machine) if options.keeps_activations else Room(), list[Mapping[int, KeptLevels]]()
    savings = savings or savings_for(options)
    for program in programs:
        runs = functools.partial(runs_of, program, micro_batches=options.micro_batches)
        found.append(kept_levels(program, runs, savings, room) if room.both else {})
        room = room.less(Room.sum(levels.room for levels in found[-1].values()))
    return found


def runs_of(program: Program, segment: Segment, micro_batches: int) -> list[Bindings]:
    """The sizes of each micro-batch of a segment."""
    return block_bindings(segment.block, program.bindings, program.captured.batch, micro_batches)


def _slabs(programs: Sequence[Program], options: Options) -> int | None:
    """Bytes of the weight slabs of a device with memory of its own; None for the host, where weights are fetched as aliases."""
    if not kind_of(options.device).pins_memory:
        return None
    largest = max((slab_bytes(program.streamed, program.bindings) for program in programs), default=0)
    return (options.prefetch + 1) * largest


@dataclass(frozen=True, eq=False)
class _Held:
    """Memory of the device: bytes, purpose, and the spec of the value in it (None for weights)."""

    bytes: int
    kind: str
    spec: TensorSpec | None = None

    @functools.cached_property
    def name(self) -> str:
        """The spec as a text, which is asked for at each node."""
        return str(self.spec)


class _DryRun:
    """One step of a program. `peak` has the bytes of each kind at the moment when their sum is largest."""

    def __init__(
        self,
        program: Program,
        options: Options,
        lowering: Lowering,
        slabs: int | None,
        savings: Savings,
        levels: Mapping[int, KeptLevels],
        limit: int | None,
    ):
        self.program, self.options, self.lowering, self.slabs = program, options, lowering, slabs
        self.captured = program.captured
        rows = program.bindings.get(self.captured.batch, 1)
        self.micro_batches = min(MicroBatches(program, options, lowering).of(program.bindings), rows)
        self.held: dict[fx.Node, _Held] = {}
        self.peak: Counter[str] = Counter()
        self.most: dict[tuple[str, str], int] = {}  # the most values of one kind and spec at once
        self.samples: list[tuple[fx.Node, Counter[str]]] = []
        self._handlers = {
            nodes.fetch_weights: self._fetch,
            nodes.fetch_resident: self._fetch_resident,
            nodes.forward: self._forward,
            nodes.backward: self._backward,
            nodes.release: self._release,
            nodes.split: self._split,
            nodes.join: self._join,
            nodes.merge: self._merge,
            nodes.keep_input: self._keep,
            nodes.keep_output: self._keep,
            nodes.keep_activations: self._keep_activations,
            nodes.restore_activations: self._restore_activations,
        }
        self.savings, self.levels, self._limit = savings, levels, limit
        self.sent: list[
            int
        ] = []  # bytes of the micro-batches on their way to the host, which are on the device until they are there
        self.brought: dict[int, list[tuple[int, int]]] = {}  # by segment: micro-batches on their way back, and their bytes
        self.sums: dict[int, int] = {}  # of gradients over the turns so far, by segment
        self.others: dict[
            int, tuple[dict[fx.Node, _Held], dict[int, int]]
        ] = {}  # `held` and `sums` of other calls, by their number
        self.kept = 0  # bytes that stay for the next call

    def step(self) -> None:
        """Forward, and backward if there is one; of a step whose last turns run in the next call, some calls."""
        for graph in self.program.graphs.values():
            self.held, self.sent, self.others, of = {}, [], {}, 0
            for call, node in self._order_of(graph):
                if call != of:
                    self.others[of], (self.held, self.sums) = (self.held, self.sums), self.others.pop(call, ({}, {}))
                    of = call
                if nodes.holds_device_memory(node) or node.target in self._handlers:
                    self._node = node
                    self._handlers.get(node.target, self._make)(node)  # type: ignore[arg-type]
                    self._look(0)

    def _order_of(self, graph: fx.Graph) -> Sequence[Run]:
        schedule, stages = self.program.schedule, self.program.stages
        if schedule is None or stages is None or not pauses(graph):
            return [(0, node) for node in graph.nodes]
        return calls_in_a_row(graph, schedule.orders[stages.rank], 4)

    @property
    def without_weights(self) -> int:
        """Bytes at the peak beside slabs."""
        return sum(self.peak.values()) - (self.slabs or 0)

    def add_weights(self, staying: int) -> None:
        """Count weights that are on the device in the whole call."""
        for held in (self.peak, *(held for _, held in self.samples)):
            held[WEIGHTS] += staying

    def growth(self) -> list[str]:
        """A line for each kind and spec of which the device holds more values at once than neighbouring layers need."""
        return [
            f"{kind}: {count} values {spec} are on the device at once, since {_why(kind, self.options)}"
            for (kind, spec), count in self.most.items()
            if count > self._few(kind)
        ]

    def _few(self, kind: str) -> int:
        """The number of values of one kind and spec that neighbouring segments may need at once."""
        ahead = self.options.prefetch + 1
        return ahead if kind == STASHES and self.options.stash == "device" else 2 * ahead + 4

    def _look(self, workspace_bytes: int, gradients: int = 0) -> None:
        now = Counter({ACTIVATIONS: workspace_bytes, GRADIENTS: gradients, WEIGHTS: self.slabs or 0})
        there = [(self.held, self.sums), *self.others.values()]
        now[GRADIENTS] += sum(size for _, sums in there for size in sums.values())
        now[STASHES] = sum(self.sent) + sum(size for brought in self.brought.values() for _, size in brought)
        values: Counter[tuple[str, str]] = Counter()
        for held in (each for of_call, _ in there for each in set(of_call.values())):
            now[held.kind] += held.bytes
            if held.spec is not None and held.spec.batch is not None:
                values[held.kind, held.name] += 1
        self.samples.append((self._node, now))
        for key, count in values.items():
            self.most[key] = max(count, self.most.get(key, 0))
        if sum(now.values()) > sum(self.peak.values()):
            self.peak = now.copy()

    def _bytes(self, node: fx.Node) -> int:
        """Bytes of the value of a node: of one micro-batch, if it is made in turns."""
        spec, bindings = node.meta["spec"], self.program.bindings
        if (turn := node.meta.get("turn")) is not None:
            assert self.captured.batch is not None
            sizes = micro_batch_sizes(int(bindings[self.captured.batch]), self.micro_batches)
            return spec.bytes({**bindings, self.captured.batch: sizes[turn]})
        return spec.bytes(bindings) // (self.micro_batches if spec.equal_rows else 1)

    def _make(self, node: fx.Node) -> None:
        if node.meta.get("kind") == "activations":
            runs = [user for user in node.users if nodes.runs_segment(user)]  # none if its segment runs no backward
            self.held[node] = self._activations_of(nodes.operands(runs[0]).segment) if runs else _Held(0, STASHES)
        elif node.meta.get("kind") == "weights":
            runs = [user for user in node.users if nodes.runs_segment(user)]
            self.held[node] = self._weights_of(nodes.operands(runs[0]).segment) if runs else _Held(0, WEIGHTS)
        elif nodes.result_of(node) is nodes.Result.TAKEN:
            (source,) = node.all_input_nodes
            self.held[node] = self.held.pop(source)
        elif nodes.carries(node) is nodes.Carries.GRADIENTS:  # of this rank
            segment = self.program.segments[nodes.operands(node).segment]
            self.held[node] = _Held(self._pushed(segment) // self.captured.shards, GRADIENTS)
        elif "spec" in node.meta and not _is_made_by_a_segment(node):
            self.held[node] = _Held(self._bytes(node), _kind_of(node), node.meta["spec"])

    def _join(self, node: fx.Node) -> None:
        """The parts of the turns, in their own memory."""
        parts = [part for part in nodes.operands(node).parts if part in self.held]
        self.held[node] = _Held(sum(self.held[part].bytes for part in parts), _kind_of(node), node.meta["spec"])
        self.held |= {part: _Held(0, self.held[part].kind) for part in parts}

    def _split(self, node: fx.Node) -> None:
        spec = node.meta["spec"]
        is_view = spec.batch is not None and spec.batch.dim == 0
        source = nodes.operands(node).x
        if is_view and source in self.held:
            self.held[node] = self.held[source]
        else:
            self._make(node)

    def _merge(self, node: fx.Node) -> None:
        source = nodes.operands(node).x
        if self.micro_batches == 1 and source in self.held:
            self.held[node] = self.held[source]
        else:
            self._make(node)

    def _release(self, node: fx.Node) -> None:
        self.held.pop(nodes.operands(node).x, None)

    def _keep(self, node: fx.Node) -> None:
        """What a call leaves as it was is kept only if it comes again, which is not known."""
        source = nodes.operands(node).x
        size = self.held[source].bytes
        if source.target is nodes.recall or self._limit is not None and self.kept + size > self._limit:
            del self.held[source]
        else:
            self.kept += size

    def _keep_activations(self, node: fx.Node) -> None:
        self.held[node] = self._activations_of(nodes.operands(node).segment)

    def _activations_of(self, segment: int) -> _Held:
        """What a segment keeps on the device for its backward."""
        levels = self.levels.get(segment)
        return _Held(levels.room.device if levels is not None else 0, STASHES)

    def _restore_activations(self, node: fx.Node) -> None:
        """The first micro-batches that come back from the host."""
        self.held[node] = _Held(0, STASHES)
        index = nodes.operands(node).segment
        self.brought[index] = self._on_host(index)[: self._ahead(self.program.segments[index])]

    def _on_host(self, segment: int) -> list[tuple[int, int]]:
        """The micro-batches that a segment keeps on the host, and their bytes."""
        levels = self.levels.get(segment)
        parts = levels.parts if levels is not None else ()
        return [(n, part.bytes) for n, part in enumerate(parts) if part is not None and part.on_host]

    def _fetch(self, node: fx.Node) -> None:
        segment = self.program.segments[nodes.operands(node).segment]
        in_slab = self.slabs is not None
        self.held[node] = _Held(0 if in_slab else segment.block.weight_bytes(self.program.bindings), WEIGHTS)

    def _fetch_resident(self, node: fx.Node) -> None:
        self.held[node] = self._weights_of(nodes.operands(node).segment)

    def _weights_of(self, segment: int) -> _Held:
        """The weights of a segment in memory of their own."""
        return _Held(self.program.segments[segment].block.weight_bytes(self.program.bindings), WEIGHTS)

    def _forward(self, node: fx.Node) -> None:
        segment, read = self.program.segments[nodes.operands(node).segment], nodes.operands(node)
        runs = self._runs(segment)
        wanted = tuple(i in read.wanted for i in range(len(segment.block.outputs))) if read.wanted else None
        results = [user for user in node.users if user.target is operator.getitem]
        made = {result: _made(segment, segment.block.outputs[nodes.operands(result).index], runs) for result in results}
        streamed = [result for result in results if result.meta.get("host") or passes_on(result)]
        kept = on_its_way = 0  # an output that is streamed to the host is on its way while the next one is computed
        numbers = range(len(runs)) if read.turn is None else [read.turn]
        for number, sizes in ((number, runs[number]) for number in numbers):
            part, saving = self._part(segment, number), self._saving(segment, number, sizes)
            lowered = saving.forward if saving is not None else self.lowering.forward(segment.block, sizes, number > 0, wanted)
            self._look(lowered.workspace_bytes + kept + on_its_way)
            if part is not None and part.on_host:
                self.sent.append(part.bytes)
                self.sent = self.sent[max(0, len(self.sent) - self._ahead(segment)) :]
            elif part is not None:
                kept += part.bytes
            on_its_way = sum(made[result][number] for result in streamed)
            kept += sum(parts[number] for result, parts in made.items() if result not in streamed)
        for result in results:
            if not result.meta.get("host"):  # of what leaves for other ranks, the last part is still there
                size = made[result][-1] if result in streamed else sum(made[result][number] for number in numbers)
                self.held[result] = _Held(size, _kind_of(result), result.meta["spec"])

    def _backward(self, node: fx.Node) -> None:
        segment = self.program.segments[nodes.operands(node).segment]
        block, runs, turn = segment.block, self._runs(segment), nodes.operands(node).turn
        gradient_mask = tuple(gradient is not None for gradient in nodes.arriving_gradients(node))
        streamed = zip(nodes.operands(node).streamed_gradients, block.outputs, strict=False)
        arrives = [_made(segment, spec.detached(), runs) for gradient, spec in streamed if gradient is not None]
        gathered = cast = 0
        passing = {len(block.weights) + nodes.operands(user).index for user in node.users if passes_on(user)}
        leaves = [0] * len(block.operands)  # what passes on to other ranks, of the last micro-batch
        sums = self.sums.pop(segment.index, 0)  # of the turns so far
        gathered += sums
        for number, sizes in ((number, runs[number]) for number in (range(len(runs)) if turn is None else [turn])):
            saving = self._saving(segment, number, sizes)
            self._bring(segment, number)
            lowered = saving.backward if saving is not None else self.lowering.backward(block, sizes, gradient_mask)
            arrived = sum(sum(parts[number : number + 2]) for parts in arrives)  # the next micro-batch's gradient comes meanwhile
            self._look(lowered.workspace_bytes, arrived + gathered + sum(leaves))
            self._drop(segment.index, number)
            there = [(i, spec) for i, spec in enumerate(block.operands) if lowered.present[i]]
            for (index, spec), dtype in zip(there, lowered.dtypes, strict=True):
                if index in passing:
                    leaves[index] = _bytes_in(dtype, spec, sizes)
                elif spec.splits and block.inner_looped:
                    gathered += _bytes_in(dtype, spec, sizes)
                elif number == 0 or turn == len(runs) - 1:
                    of_sum = torch.float32 if len(runs) > 1 and dtype.itemsize == 2 else dtype
                    gathered += _bytes_in(of_sum, spec, sizes) if number == 0 else 0
                    sums += _bytes_in(of_sum, spec, sizes) if number == 0 else 0
                    is_weight = index < len(block.weights)
                    leaves_in = gradient_dtype(spec, self.options.gradients_on_link) if is_weight else spec.gradient_dtype
                    cast += _bytes_in(leaves_in, spec, sizes) if of_sum is not leaves_in else 0
        if turn is not None and turn < len(runs) - 1:
            self.sums[segment.index] = sums
        elif not segment.sharded:  # every gradient is there, with the casts for the link
            self._look(0, gathered + cast + sum(leaves))
        self._hold_gradients(node, segment, leaves)

    def _hold_gradients(self, node: fx.Node, segment: Segment, leaves: Sequence[int]) -> None:
        """The results of a backward; `leaves` are the bytes of the last micro-batch of each operand's gradient that passes on."""
        for result in (user for user in node.users if user.target is operator.getitem):
            if passes_on(result):
                operand = len(segment.block.weights) + nodes.operands(result).index
                self.held[result] = _Held(leaves[operand], GRADIENTS, result.meta["spec"])
            elif "spec" in result.meta:
                self.held[result] = _Held(self._bytes(result), GRADIENTS, result.meta["spec"])
            else:
                size = self._summed(segment) if segment.sharded else self._pushed(segment)
                self.held[result] = _Held(size, GRADIENTS)

    def _summed(self, segment: Segment) -> int:
        """Bytes of a bundle that is still to be reduced over ranks: it has the width of its sums, 32 bits at least."""
        trained, sizes = [w for w in segment.block.weights if w.differentiable], self.program.bindings
        return sum(_bytes_in(torch.promote_types(w.dtype, torch.float32), w, sizes) for w in trained)

    def _pushed(self, segment: Segment) -> int:
        trained, link = [w for w in segment.block.weights if w.differentiable], self.options.gradients_on_link
        return sum(_bytes_in(gradient_dtype(w, link), w, self.program.bindings) for w in trained)

    def _runs(self, segment: Segment) -> list[Bindings]:
        """The sizes of each micro-batch of a segment."""
        return runs_of(self.program, segment, self.micro_batches)

    def _part(self, segment: Segment, number: int) -> KeptPart | None:
        """What a segment keeps of a micro-batch."""
        levels = self.levels.get(segment.index)
        return levels.parts[number] if levels is not None else None

    def _saving(self, segment: Segment, number: int, sizes: Bindings) -> Saving | None:
        """The code of a micro-batch of a segment that keeps something of it; None if it keeps nothing."""
        part = self._part(segment, number)
        if part is None:
            return None
        return self.savings.saving((segment.block, sizes, self.levels[segment.index].mask, part.level))

    def _ahead(self, segment: Segment) -> int:
        return ahead(self.options.prefetch, len(self._runs(segment)))

    def _bring(self, segment: Segment, number: int) -> None:
        """What comes back from the host before a micro-batch is computed, beside what is there."""
        waiting, there = [each for each in self._on_host(segment.index) if each[0] >= number], self.brought.get(segment.index, [])
        count = self._ahead(segment) + (bool(waiting) and waiting[0][0] == number)
        self.brought[segment.index] = waiting[: max(count, len(there))]

    def _drop(self, segment: int, number: int) -> None:
        """A micro-batch is computed."""
        self.brought[segment] = [each for each in self.brought[segment] if each[0] != number]


def _made(segment: Segment, spec: TensorSpec, runs: Sequence[Bindings]) -> list[int]:
    """Bytes that each micro-batch of a segment makes of a value."""
    once = spec.computed_once or not segment.block.inner_looped
    return [0 if once and number else spec.bytes(sizes) for number, sizes in enumerate(runs)]


def _bytes_in(dtype: torch.dtype, spec: TensorSpec, sizes: Bindings) -> int:
    """Bytes of a value in another dtype than its own."""
    return spec.bytes(sizes) // spec.dtype.itemsize * dtype.itemsize


def _is_made_by_a_segment(node: fx.Node) -> bool:
    """Whether a value is a result of a segment, which counts it while it runs."""
    return node.target is operator.getitem and nodes.operands(node).results.target is not nodes.recv


def _kind_of(node: fx.Node) -> str:
    """The purpose of a value on the device."""
    source = nodes.operands(node).x if node.target in (nodes.restore, nodes.recall) else node
    kind = source.meta.get("kind")
    if kind == "gradient" or str(node.meta.get("value", "")).startswith("d "):
        return GRADIENTS
    if kind == "stash" or any(user.target is nodes.stash for user in node.users):
        return STASHES
    return ACTIVATIONS


def _why(kind: str, options: Options) -> str:
    if kind == STASHES and options.stash == "device":
        return "the option stash is 'device': 'host' sends them to the host"
    if options.goes_by_turns:
        return "they stay there until their micro-batch goes back"
    return "later layers read all of them"
