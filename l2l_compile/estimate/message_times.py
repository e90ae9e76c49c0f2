"""Messages between the stages of a pipeline in virtual time, on sizes alone. As `runtime/messages.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import picked
from l2l_compile.lanes import Lane
from l2l_compile.runtime.messages import Part, counts_of, parts_left, parts_of
from l2l_compile.runtime.rows import StepRows
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import SimulatedLane
from l2l_compile.simulation.simulated_pipeline import SimulatedPipeline

Values = Sequence[TimedValue]


class MessagingRun(Protocol):
    """The program that runs (`graph_times.py`)."""

    machine: Machine
    lanes: Mapping[str, SimulatedLane]
    rows: StepRows
    step: Any
    channel: int
    left: set[fx.Node]
    outgoing: list[TimedValue]
    arriving: list[TimedValue]

    @property
    def pipeline(self) -> SimulatedPipeline: ...

    @property
    def absent(self) -> frozenset[tuple[int, str]]: ...

    def submit(self, lane: str, reads: Values, fills: Values, work: Callable[[], None]) -> None: ...


class ArrivalTimes:
    """As `Arrival`."""

    def __init__(self, run: MessagingRun, source: int, described: Sequence[fx.Node], values: Values):
        self._run, self._source, self._values = run, source, values
        self._specs = [(node.meta["spec"], node.meta["split"], node.meta.get("turn")) for node in described]
        self._counts = counts_of(run.step, described)
        self._parts = parts_of(self._counts)
        self._works: dict[Part, Any] = {}  # of the lane `recv`
        self._there: dict[Part, TimedValue] = {}  # stand for the parts that somebody waits for
        for value in values:
            value.arrival = self
        run.lanes[Lane.RECV].wait(run.lanes[Lane.COMPUTE].record())  # memory that compute may have released before
        run.submit(Lane.RECV, (), (), self._ask)

    def part(self, value: TimedValue, micro_batch: int) -> TimedValue:
        """Stands for a micro-batch of a value: who reads it waits until it is there. A whole value is one part."""
        position = next(position for position, each in enumerate(self._values) if each is value)
        wanted = position, min(micro_batch, max(self._counts[position] - 1, 0))
        for part in self._parts[: self._parts.index(wanted) + 1]:
            if part not in self._there:
                self._there[part] = self._awaited(part)
        return self._there[wanted]

    def complete(self, value: TimedValue) -> None:
        """Who reads a value waits for all of it."""
        position = next(position for position, each in enumerate(self._values) if each is value)
        last = self.part(value, max(self._counts[position] - 1, 0))
        value.lane, value.event = last.lane, last.event

    def _ask(self) -> None:
        for value, (spec, is_split, turn) in zip(self._values, self._specs, strict=True):
            value.parts = [math.prod(shape) * spec.dtype.itemsize for shape in self._run.rows.shapes(spec, is_split, turn)]
            value.equal = spec.equal_rows and turn is None
        for part in self._parts:
            self._works[part] = self._run.pipeline.ask(self._source, self._run.channel)

    def _awaited(self, part: Part) -> TimedValue:
        made = TimedValue()
        self._run.submit(Lane.RECV, (), (made,), lambda: self._run.pipeline.finish_message(self._works.pop(part)))
        return made


class ArrivingTimes:
    """As `ArrivingParts`."""

    def __init__(self, run: MessagingRun, values: Values):
        self._run, self._values = run, values

    def before(self, number: int) -> None:
        for value in self._values:
            there = value.arrival.part(value, number)
            if there.event is not None:
                self._run.lanes[Lane.COMPUTE].wait(there.event)

    def after(self, number: int) -> None:
        """The value is released like any other."""

    def end(self) -> None:
        for value in self._values:
            value.arrival.complete(value)


@dataclass(frozen=True, eq=False)
class LeavingMessage:
    """As `Leaving`."""

    to: int
    values: Values
    counts: Sequence[int]


class LeavingTimes:
    """As `LeavingParts`."""

    def __init__(self, run: MessagingRun, messages: Sequence[LeavingMessage], passing: Values):
        self._run, self._messages, self._passing = run, messages, passing
        self._has_left = False

    def before(self, number: int) -> None:
        """Nothing is waited for."""

    def after(self, number: int) -> None:
        lanes = self._run.lanes
        made = TimedValue(lane=Lane.COMPUTE, event=lanes[Lane.COMPUTE].record())
        if self._has_left:
            _finish(self._run, self._values(), ())
            if self._passing:
                lanes[Lane.COMPUTE].wait(lanes[Lane.SEND].record())
        for message in self._messages:
            parts = [(position, number) for position, count in enumerate(message.counts) if number < count]
            send_parts(self._run, message.to, message.values, parts, made)
        self._has_left = True

    def end(self) -> None:
        if self._run.machine.overlaps:
            values = self._values()
            _finish(self._run, values, values)

    def _values(self) -> Values:
        return list({id(value): value for message in self._messages for value in message.values}.values())


def send_parts(run: MessagingRun, to: int, values: Values, parts: Sequence[Part], *made: TimedValue) -> None:
    """As `send_parts` of `runtime/messages.py`."""
    leaving = []
    for value in values:
        value.outgoing = value.outgoing if value.outgoing is not None else []
        leaving.append((value, value.outgoing))

    def work() -> None:
        for position, number in parts:
            value, messages = leaving[position]
            messages.append(run.pipeline.send_bytes(value.parts[number], to, run.channel))

    run.submit(Lane.SEND, made or values, (), work)


def finish_messages(run: MessagingRun, value: TimedValue) -> None:
    """As `finish_messages` of `runtime/messages.py`."""
    if value.arrival is not None:
        value.arrival.complete(value)
    if value.outgoing is not None:
        _finish(run, [value], [value])


def _finish(run: MessagingRun, values: Values, reads: Values) -> None:
    under_way = [value.outgoing for value in values if value.outgoing is not None]
    for value in values:
        value.outgoing = None

    def work() -> None:
        for messages in under_way:
            for message in messages:
                run.pipeline.finish_message(message)

    run.submit(Lane.SEND, reads, (), work)


def send(run: MessagingRun, node: fx.Node, values: Values, to: int) -> TimedValue:
    """The node `send`."""
    described = nodes.operands(node).values
    there = [(value, n) for value, n in zip(values, described, strict=True) if not value.absent]
    parts = parts_left(run.step, [n for _, n in there], node in run.left)
    if parts:
        send_parts(run, to, [value for value, _ in there], parts)
        run.outgoing += [value for value, _ in there]
    return TimedValue(absent=True)


def recv(run: MessagingRun, node: fx.Node, source: int) -> TimedValue:
    """The node `recv`."""
    received = picked(node)
    values = [TimedValue(absent=(user.meta["segment"], user.meta["value"]) in run.absent) for user in received]
    arriving = [(user, value) for user, value in zip(received, values, strict=True) if not value.absent]
    if arriving:
        run.arriving += [value for _, value in arriving]
        ArrivalTimes(run, source, [user for user, _ in arriving], [value for _, value in arriving])
    return TimedValue(results=values)


def leaving_results(
    run: MessagingRun, messages: Sequence[fx.Node], results: Values, passing: Sequence[int]
) -> list[LeavingTimes]:
    """As `_leaving` of the executor: the messages of results of a segment that leave as they are made."""
    found = []
    for message in messages:
        read = nodes.operands(message)
        split = {value: results[nodes.operands(value).index] for value in read.values if value.meta["split"]}
        there = [value for value, result in split.items() if not result.absent]
        if there:
            leaving = [split[value] for value in there]
            found.append(LeavingMessage(read.to, leaving, counts_of(run.step, there)))
            run.left.add(message)
            run.outgoing += leaving
    alone = [results[i] for i in passing if not results[i].absent]
    return [LeavingTimes(run, found, alone)] if found else []
