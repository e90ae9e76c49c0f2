"""Memory of the device and of the host over a step: the expected bytes at each node, at the times of a timeline."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from l2l_compile.devices.labels import label_of
from l2l_compile.estimate.device_memory import ACTIVATIONS, GRADIENTS, STASHES, WEIGHTS, StepLevels, samples
from l2l_compile.estimate.host_memory import HostMemory
from l2l_compile.ir import nodes
from l2l_compile.ir.program import LEAST_ON_DISK, Program
from l2l_compile.lanes import OF_DEVICE, Lane
from l2l_compile.options import Options
from l2l_compile.simulation.machine import Machine
from l2l_compile.timeline import Timeline

DEVICE = (WEIGHTS, STASHES, ACTIVATIONS, GRADIENTS)
HOST = ("parameters", "optimizer state", "wires", GRADIENTS, STASHES)


@dataclass
class Curve:
    """Bytes by kind over a step. `bytes[i]` holds from `times[i]` on, in seconds since the step began."""

    kinds: tuple[str, ...]
    times: list[float] = field(default_factory=list)
    bytes: list[list[int]] = field(default_factory=list)

    def add(self, time: float, held: Sequence[int]) -> None:
        """Add the bytes from a time on. Of several at the same time, the largest stay."""
        if self.times and self.times[-1] == time:
            if sum(held) > sum(self.bytes[-1]):
                self.bytes[-1] = list(held)
        elif not self.bytes or self.bytes[-1] != list(held):
            self.times.append(time)
            self.bytes.append(list(held))


def device_curve(
    programs: Sequence[Program],
    options: Options,
    timeline: Timeline,
    machine: Machine | None = None,
    levels: StepLevels | None = None,
) -> Curve:
    """The curve of the device's memory. Raises `LoweringError` for a block that cannot be traced."""
    curve, clock = Curve(DEVICE), _Clock(timeline)
    curve.add(0.0, [0] * len(DEVICE))
    for program, sampled in zip(programs, samples(programs, options, machine, levels), strict=True):
        for node, held in sampled:
            curve.add(clock.at(node, program), [held[kind] for kind in DEVICE])
    return curve


def host_curve(programs: Sequence[Program], memory: HostMemory, options: Options, timeline: Timeline) -> Curve:
    """The curve of the host's memory. Gradients grow as they are pushed, up to the bytes that the option `update` needs.

    While gradients are pushed, the ring of gradients on their way counts as well. The curve stays below `memory.total`, which is
    the sum of the largest of each kind: stashes are most when forward ends, gradients when backward ends.
    """
    curve, clock = Curve(HOST), _Clock(timeline)
    fixed = [memory.master, memory.optimizer_state or 0, memory.wire - memory.shared]
    pushes = [bytes_ for _, _, _, bytes_ in _pushes(programs)]
    pushed, to_come = sum(pushes) or 1, len(pushes)
    late = memory.disk.late_gradients if memory.disk is not None else 0
    waiting = memory.gradients if options.mode.keeps_gradients else late  # gradients of the step before
    arrived = stashes = on_their_way = 0
    fetched: set[int] = set()
    curve.add(0.0, [*fixed, waiting, 0])
    for program in programs:
        kept, taken = _kept_on_host(program, programs, memory.activations)
        for graph in program.graphs.values():
            for node in graph.nodes:
                if node in kept:
                    stashes += kept[node]
                elif node in taken:
                    stashes = max(0, stashes - taken[node])
                elif nodes.fetches_weights(node) and graph is program.forward.graph and waiting:
                    index = nodes.operands(node).segment
                    if index not in fetched:
                        fetched.add(index)
                        waiting -= min(waiting, memory.gradients * _gradient_bytes(program, index) // pushed)
                elif node.target is nodes.push_gradients:
                    arrived += _gradient_bytes(program, nodes.operands(node).segment)
                    to_come -= 1
                    on_their_way = memory.ring if to_come else 0
                else:
                    continue
                held = waiting + memory.gradients * arrived // pushed + on_their_way
                curve.add(clock.at(node, program), [*fixed, held, stashes])
    return curve


def _kept_on_host(
    program: Program, programs: Sequence[Program], activations: int
) -> tuple[Mapping[fx.Node, int], Mapping[fx.Node, int]]:
    """The nodes of forward that leave something on the host for backward, and those of backward that take it, with its bytes.

    What all programs keep of the inside of their segments is taken to be the same in each segment.
    """
    sends = [node for p in programs for node in p.forward.graph.nodes if node.target is nodes.offload_activations]
    each = activations // max(1, len(sends))
    kept = program.host_stashes | {node: each for node in sends if node.graph is program.forward.graph}
    if program.backward is None:
        return kept, {}
    backward = program.backward.graph
    restores = backward.find_nodes(op="call_function", target=nodes.restore)
    restored = {node: size for node in restores if (size := _bytes(node, program)) < LEAST_ON_DISK or not _is_loaded(node)}
    runs = backward.find_nodes(op="call_function", target=nodes.backward)
    return kept, restored | {node: each for node in runs if nodes.operands(node).restored_activations is not None}


def _is_loaded(restore: fx.Node) -> bool:
    """Whether a value comes from the disk."""
    return nodes.operands(restore).x.target is nodes.load


def _pushes(programs: Sequence[Program]) -> Iterator[tuple[Program, fx.Node, int, int]]:
    for program in programs:
        for graph in program.graphs.values():
            for node in graph.find_nodes(op="call_function", target=nodes.push_gradients):
                index = nodes.operands(node).segment
                yield program, node, index, _gradient_bytes(program, index)


def _gradient_bytes(program: Program, index: int) -> int:
    return program.segments[index].block.gradient_bytes(program.bindings)


def _bytes(node: fx.Node, program: Program) -> int:
    spec = node.meta.get("spec")
    return spec.bytes(program.bindings) if spec is not None else 0


class _Clock:
    """The times at which nodes ran, by their labels. A node without work on a lane gets the time of the node before it."""

    def __init__(self, timeline: Timeline):
        self._times: dict[str, deque[float]] = defaultdict(deque)
        by_lanes = [p for p in timeline.spans if p.lane in OF_DEVICE]  # none where the host is the device: the caller computes
        for span in sorted(by_lanes or timeline.of(Lane.CALLER), key=lambda p: p.start):
            label, _, micro_batch = span.label.partition(", micro-batch ")
            if micro_batch in ("", "1"):
                self._times[label].append(span.start - timeline.start)
        self._now = 0.0

    def at(self, node: fx.Node, program: Program) -> float:
        times: Any = self._times.get(label_of(node, program.segments)) if node.op == "call_function" else None
        if times:
            self._now = max(self._now, times.popleft())
        return self._now
