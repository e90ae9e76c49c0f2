"""Messages between the stages of a pipeline: values that go to another rank, or come from one, micro-batch by micro-batch.

Two lanes carry them, one for each direction. With one lane for both, a rank that waits for a message could not send the one that the
other rank waits for.

    rank 0, segment i       compute   0   1   2   3              send       0   1   2   3
    rank 1, segment i + 1   recv          0   1   2   3          compute        0   1   2   3

The parts of a message are those of its values: the micro-batches of split values, in turn, and then the whole values. Of a value
whose rows are all equal, the first micro-batch goes alone. Both ranks count the parts alike, so that those of different messages
cannot be mixed up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from l2l_compile.devices.device import Device
from l2l_compile.errors import RankError
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import Lane
from l2l_compile.ranks.collectives import arrives_in_order
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.step import Step

Values = Sequence[RuntimeValue]
Part = tuple[int, int]  # the position of a value in its message, and the number of a micro-batch


class GraphRun(Protocol):
    """The run of a graph, as messages need it (`executor.py`)."""

    device: Device
    step: Step
    segments: Sequence[Segment]

    def submit(self, lane: str, reads: Values, fills: Values, work: Callable[[], Any]) -> None: ...

    def submit_behind_releases(self, lane: str, reads: Values, fills: Values, work: Callable[[], Any]) -> None: ...


def parts_of(counts: Sequence[int]) -> list[Part]:
    """The parts of a message in order. `counts` has the parts of each value (`counts_of`)."""
    of_split = [(position, n) for n in range(max(counts, default=0)) for position, count in enumerate(counts) if n < count]
    return of_split + [(position, 0) for position, count in enumerate(counts) if not count]


def counts_of(step: Step, values: Sequence[fx.Node]) -> list[int]:
    """How many parts each of these values of a program has: one a micro-batch, 1 if all rows are equal; 0 for a whole value, or one turn."""
    of_split = len(step.rows.sizes)
    return [
        (1 if value.meta["spec"].equal_rows else of_split) if value.meta["split"] and "turn" not in value.meta else 0
        for value in values
    ]


def parts_left(step: Step, described: Sequence[fx.Node], has_left: bool) -> list[Part]:
    """The parts of a message that are to be sent at its node: if micro-batches `has_left` as they were made, whole values alone."""
    counts = counts_of(step, described)
    return [(position, number) for position, number in parts_of(counts) if not (has_left and counts[position])]


class Arrival:
    """A message on its way to this rank, which fills its values part by part.

    A segment that reads one of them waits for its micro-batches one by one; whatever else reads it waits for all.
    """

    def __init__(self, run: GraphRun, source: int, described: Sequence[fx.Node], values: Values):
        self._run, self._source, self._values = run, source, values
        self._what = (
            f"'{described[0].meta['value']}' of segment '{run.segments[described[0].meta['segment']].name}' from rank {source}"
        )
        self._specs = [(node.meta["spec"], node.meta["split"], node.meta.get("turn")) for node in described]
        self._counts = counts_of(run.step, described)
        self._parts = parts_of(self._counts)
        self._works: dict[Part, Any] = {}  # of the lane `recv`
        self._there: dict[Part, RuntimeValue] = {}  # stand for the parts that somebody waits for
        for value in values:
            value.arrival = self
        in_order = arrives_in_order(run.device.torch_device)
        run.submit_behind_releases(Lane.RECV, (), (), self._make_room if in_order else self._ask_for_all)
        if in_order:
            # an event of its own for each part: one behind all that the lane was asked for would wait for later messages as well,
            # and another rank may send those only when it has what this one makes of this message
            for part in self._parts:
                self._there[part] = self._awaited(part, functools.partial(self._ask, part))

    def part(self, value: RuntimeValue, micro_batch: int) -> RuntimeValue:
        """Stands for a micro-batch of a value: who reads it waits until it is there. A whole value is one part."""
        position = next(position for position, each in enumerate(self._values) if each is value)
        wanted = position, min(micro_batch, max(self._counts[position] - 1, 0))
        for part in self._parts[: self._parts.index(wanted) + 1]:
            if part not in self._there:
                self._there[part] = self._awaited(part)
        return self._there[wanted]

    def complete(self, value: RuntimeValue) -> None:
        """Who reads a value waits for all of it."""
        position = next(position for position, each in enumerate(self._values) if each is value)
        last = self.part(value, max(self._counts[position] - 1, 0))
        value.lane, value.event = last.lane, last.event

    def _make_room(self) -> None:
        """Make room for all parts (lane `recv`)."""
        device = self._run.device
        for value, (spec, is_split, turn) in zip(self._values, self._specs, strict=True):
            device.accesses.write(value.place)
            shapes = self._run.step.rows.shapes(spec, is_split, 0 if spec.equal_rows and turn is None else turn)
            value.tensors = [torch.empty(shape, dtype=spec.dtype, device=device.torch_device) for shape in shapes]
            device.hold(value.tensors)

    def _ask(self, part: Part) -> None:
        """Ask for a part (lane `recv`)."""
        position, number = part
        tensor, step = self._values[position].tensors[number], self._run.step
        self._works[part] = pipeline_of(step).receive(tensor, self._source, step.channel)

    def _ask_for_all(self) -> None:
        self._make_room()
        for part in self._parts:
            self._ask(part)

    def _awaited(self, part: Part, ask: Callable[[], None] = lambda: None) -> RuntimeValue:
        """What stands for a part: `ask` for it, unless the lane has, and wait until it is there."""
        position, number = part
        step, device, made = self._run.step, self._run.device, RuntimeValue()
        value, (spec, is_split, turn) = self._values[position], self._specs[position]

        def replicate() -> None:
            (first,) = value.tensors
            value.tensors = step.rows.replicate(first, spec)
            device.hold(value.tensors)
            device.free([first])

        def work() -> None:
            ask()
            try:
                pipeline_of(step).finish_message(self._works.pop(part))
            except RankError as error:
                error.add_note(f"this rank, {pipeline_of(step).world_rank}, waited for {self._what}")
                raise
            step.stats.received_bytes += value.tensors[number].nbytes
            if is_split and spec.equal_rows and turn is None:
                replicate()

        self._run.submit(Lane.RECV, (), (made,), work)
        return made


class ArrivingParts:
    """The micro-batches of values that a segment reads while they arrive; as `MicroBatchCopies`.

    ahead  how many micro-batches beyond the first one are read together with it
    """

    def __init__(self, values: Values, ahead: int):
        self._values, self._ahead = values, ahead

    def before(self, micro_batch: int) -> tuple[Values, Values]:
        wanted = range(micro_batch, micro_batch + 1 + (self._ahead if micro_batch == 0 else 0))
        return [arrival_of(value).part(value, number) for value in self._values for number in wanted], ()

    def after(self, micro_batch: int) -> None:
        """The value is released like any other."""

    def end(self) -> None:
        for value in self._values:
            arrival_of(value).complete(value)


@dataclass(frozen=True, eq=False)
class Leaving:
    """A message of results of a segment that goes to another rank while they are made.

    values  those that are split
    counts  how many parts each of them has (`counts_of`)
    """

    to: int
    values: Values
    counts: Sequence[int]


class LeavingParts:
    """The micro-batches of results of a segment that go to other ranks as they are made; as `MicroBatchCopies`.

    passing  values that nothing else reads: each part is freed when it has left, while the next but one is computed
    """

    def __init__(self, run: GraphRun, messages: Sequence[Leaving], passing: Values):
        self._run, self._messages, self._passing = run, messages, passing
        self._made = RuntimeValue()
        self._left: tuple[int, RuntimeValue] | None = None  # the last part, and what stands for it

    def before(self, micro_batch: int) -> tuple[Values, Values]:
        self._made = RuntimeValue()  # stands for what the micro-batch makes
        return (), (self._made,)

    def after(self, micro_batch: int) -> None:
        if self._left is not None:
            _finish(self._run, self._values(), ())
            self._free(*self._left)
        for message in self._messages:
            parts = [(position, micro_batch) for position, count in enumerate(message.counts) if micro_batch < count]
            send_parts(self._run, message.to, message.values, parts, self._made)
        self._left = micro_batch, self._made

    def end(self) -> None:
        """The last parts leave while the next segment is computed; the release of a value waits for that, and for no later message."""
        if self._run.device.overlaps:
            values = self._values()
            _finish(self._run, values, values)

    def _values(self) -> Values:
        return list({id(value): value for message in self._messages for value in message.values}.values())

    def _free(self, number: int, made: RuntimeValue) -> None:
        """Free a part of the values that pass on, behind the messages that have it."""
        if not self._passing:
            return
        device = self._run.device
        left = device.lanes[Lane.SEND].record()
        if left is not None:
            device.lanes[Lane.COMPUTE].wait(left)

        def work() -> None:
            device.accesses.write(made.place)
            for value in self._passing:
                device.free([value.tensors[number]])
                value.tensors[number] = None

        device.lanes[Lane.COMPUTE].run(work)


def send_parts(run: GraphRun, to: int, values: Values, parts: Sequence[Part], *made: RuntimeValue) -> None:
    """Send parts of values (by their positions) in order, when `made` is made (lane `send`)."""
    leaving = []
    for value in values:
        value.outgoing = value.outgoing if value.outgoing is not None else []
        leaving.append((value, value.outgoing))

    def work() -> None:
        for position, number in parts:
            value, messages = leaving[position]
            tensor = value.tensors[number]
            messages.append(pipeline_of(run.step).send(tensor, to, run.step.channel))
            run.step.stats.sent_bytes += tensor.nbytes

    run.submit(Lane.SEND, made or values, (), work)


def finish_messages(run: GraphRun, value: RuntimeValue) -> None:
    """Have lanes wait until a value has come, or left: its memory is released next, or the run of the graph ends."""
    if value.arrival is not None:
        value.arrival.complete(value)
    if value.outgoing is not None:
        _finish(run, [value], [value])


def _finish(run: GraphRun, values: Values, reads: Values) -> None:
    """Have the lane `send` wait until all parts of values that were sent so far have left. `reads` are the values that this is all of."""
    under_way = [value.outgoing for value in values if value.outgoing is not None]
    for value in values:
        value.outgoing = None

    def work() -> None:
        for messages in under_way:
            for message in messages:
                pipeline_of(run.step).finish_message(message)

    run.submit(Lane.SEND, reads, (), work)


def arrival_of(value: RuntimeValue) -> Arrival:
    """The message that a value comes with."""
    assert value.arrival is not None
    return value.arrival


def pipeline_of(step: Step) -> PipelineRanks:
    """The ranks of the pipeline that runs a step."""
    pipeline = step.world.pipeline if step.world is not None else None
    assert isinstance(pipeline, PipelineRanks), "only a pipeline has messages"
    return pipeline
