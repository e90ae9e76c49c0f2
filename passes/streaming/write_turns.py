"""Write the graph of a whole step that goes forward and back turn by turn (the option `schedule`).

    begin('0F0')
    %x_0 = forward(segment, %w, (%v_0), turn=0)
    begin('0B0')
    %g_0 = backward(segment, %w, (%v_0), (%d_0), turn=0)
    begin('0F1')
    ...

A turn is one micro-batch through the segments of one stage. The weights stay on the device for the step. Each segment adds the gradients
of its weights over the turns, in their order, as the inner loop does; they are pushed behind the last one.

Segments that read all rows run behind all turns forward. Such a segment, as a loss is, must be linear in what the turns make: its
gradients are computed first of all, from operands whose contents do not matter (`blank`).

Without a flush, a call runs the graph up to `begin('pause')`, and the next call what is behind it, between turns of its own. Until the
pause, each rank asks for all messages that other ranks send it until theirs: none is on its way between two calls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.schedule import END, PAUSE, Action, Direction
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.differentiate import reached_backward
from l2l_compile.passes.streaming.linear import made_of, nonlinear_operation
from l2l_compile.passes.streaming.place_stages import borders_of, has_rows
from l2l_compile.passes.streaming.stream import taken_gradients, with_gradient
from l2l_compile.passes.streaming.turn_kinds import REMEDY, TurnKinds, refuse
from l2l_compile.passes.streaming.writer import GraphWriter

_ALL = -1  # in the place of a turn: a value that all turns share, or their parts together


@dataclass(frozen=True)
class WriteTurns:
    """Provides `turns_written`. Raises `L2LError` for what cannot run turn by turn."""

    name: ClassVar[str] = "write_turns"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PROGRAM})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.TURNS_WRITTEN})

    def apply(self, compilation: Compilation) -> None:
        compilation.step = None
        if compilation.goes_by_turns and compilation.turns > 1:  # one turn is what forward and backward do
            compilation.step = _Step(compilation).write()


class _Step:
    """Writes the graph of a step of this rank."""

    def __init__(self, compilation: Compilation):
        self.compilation, self.captured = compilation, compilation.captured
        self.writer, self.kinds = GraphWriter(), TurnKinds(compilation)
        self.stages, self.borders = compilation.stages, borders_of(compilation)
        self.inputs: dict[Value, fx.Node] = {}
        self.maker_of = {value: segment for segment in compilation.segments for value in segment.outputs}
        self.losses = {value for value in compilation.outputs if value is not None and not has_rows(compilation, value)}
        self.given: dict[int, fx.Node] = {}  # gradients of outputs, by position
        self.values: dict[tuple[Value, int], fx.Node] = {}  # by value and turn, or `_ALL`
        self.layouts: dict[tuple[Value, bool], fx.Node] = {}  # of values that all turns share: whole, or split
        self.gradients: dict[tuple[Value, int], fx.Node] = {}
        self.weights: dict[int, fx.Node] = {}
        self.received: set[tuple[int, int]] = set()  # segments of other ranks, and turns, whose values are here
        self.returned: set[tuple[int, int]] = set()  # the same, whose gradients are here
        self.ran: set[tuple[int, int]] = set()
        self.backwards = {segment.index for segment in reached_backward(compilation.segments, with_gradient(compilation))}
        self.goes_back = any(s.index in self.backwards and self.stages.runs(s) for s in self.kinds.turned)
        self.schedule = compilation.schedule
        refuse(compilation, self.kinds, self.borders, self.backwards)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def write(self) -> fx.Graph:
        for given in self.captured.inputs:
            if not given.is_weight and given.node in self.captured.specs:
                spec, name = self.captured.specs[given.node], given.node.name
                self.inputs[Value(given.node)] = self.writer.placeholder(name, name, spec, False, "input")
        for value, arrived in taken_gradients(self.compilation, self.writer, self.borders):
            self._add(value, _ALL, self.writer.derived(nodes.restore, arrived))
        self._go_back(self.kinds.late)
        self._share_early()
        here, later = self.schedule.apart(self.stages.rank)
        self._run(here)
        if not self.schedule.flushes:
            self._begin(PAUSE)
            self._ask_for_gradients(later)
            losses = self._losses()
            self._run(later)
            self._begin(END)
        else:
            self._begin(END)
            losses = self._losses()
        self._go_back(self.kinds.early)
        returned = {value: self.writer.derived(nodes.offload, node) for value, node in losses.items()}
        outputs = tuple(returned.get(value) if value is not None else None for value in self.compilation.outputs)
        self.writer.graph.output((outputs, (), ()))
        return self.writer.graph

    def _begin(self, part: object) -> None:
        self.writer.emit(nodes.begin, str(part))

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._begin(action)
            if action.direction is Direction.FORWARD:
                self._forward_turn(action)
            else:
                self._backward_turn(action)

    def _ask_for_gradients(self, later: Iterable[Action]) -> None:
        """Receive what other ranks send back in this call for turns that go back here in the next one."""
        for action in later:
            for segment in reversed(self.kinds.turned):
                (stage, *_) = self.stages.runs_on[segment.index]
                is_sent = segment.index in self.backwards and not self.stages.runs(segment)
                if is_sent and any(
                    a.direction is Direction.BACKWARD and a.turn == action.turn for a in self.schedule.apart(stage)[0]
                ):
                    self._receive_gradients(segment, action.turn)

    @property
    def turns(self) -> int:
        return self.compilation.turns

    def _of_stage(self, stage: int) -> Iterator[Segment]:
        """The segments of a stage that run turn by turn, and belong to no other stage."""
        return (s for s in self.kinds.turned if self.stages.runs_on[s.index] == (stage,))

    # ---- values ------------------------------------------------------------------------------------------------------

    def _get(self, value: Value, turn: int, split: bool) -> fx.Node:
        """The node with a value for a turn; for `_ALL`, with all of it."""
        spec = self.captured.specs[value.node]
        if (value, turn) in self.values:
            return self.values[value, turn]
        if value in self.inputs and spec.batch is not None and turn != _ALL:
            node = self.writer.derived(nodes.restore, self.inputs[value], turn, split=True)
            node.meta["turn"] = turn
            return self.values.setdefault((value, turn), node)
        if value in self.kinds.once and (value, 0) in self.values:
            return self.values[value, 0]
        return self._shared(value, split and spec.batch is not None)

    def _shared(self, value: Value, split: bool) -> fx.Node:
        """A value that all turns share, in a layout."""
        if (value, split) not in self.layouts:
            if (value, not split) in self.layouts:
                made = self.writer.converted(self.layouts[value, not split], split)
            elif value in self.inputs:
                made = self.writer.converted(self.writer.derived(nodes.restore, self.inputs[value]), split)
            else:
                made = self.writer.converted(self._joined(value), split)
            self.layouts[value, split] = made
        return self.layouts[value, split]

    def _joined(self, value: Value) -> fx.Node:
        """What all turns have made of a value."""
        parts = [self.values[value, turn] for turn in range(self.turns)]
        node = self.writer.emit(nodes.join, tuple(parts))
        return self.writer.describe(node, parts[0].meta["value"], parts[0].meta["spec"], True)

    def _weights_of(self, segment: Segment) -> fx.Node | None:
        if not segment.weights:
            return None
        if segment.index not in self.weights:
            self.weights[segment.index] = self.writer.emit(nodes.fetch_resident, segment.index, segment=segment)
        return self.weights[segment.index]

    def _describe(self, node: fx.Node, name: str, spec: TensorSpec, split: bool, turn: int) -> fx.Node:
        self.writer.describe(node, name, spec, split)
        if turn != _ALL and node.meta["split"]:
            node.meta["turn"] = turn
        return node

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _share_early(self) -> None:
        """Run what other ranks read of all turns, and receive it, in the order of the program: both ranks count the messages alike."""
        for segment in self.kinds.early:
            if self.stages.runs(segment):
                if any(map(self._receivers, segment.outputs)):
                    self._forward(segment, _ALL)
            elif self._arriving(segment, _ALL):
                self._receive(segment, _ALL)

    def _forward_turn(self, action: Action) -> None:
        """What a stage does forward in a turn. First come the messages for it, in the order in which they are sent."""
        own = list(self._of_stage(action.stage))
        for segment in self.kinds.turned:
            if own and segment.index < own[-1].index and not self.stages.runs(segment) and self._arriving(segment, action.turn):
                self._receive(segment, action.turn)
        for segment in own:
            self._forward(segment, action.turn)

    def _forward(self, segment: Segment, turn: int) -> None:
        """Run a segment forward in a turn, behind what it needs: messages, and segments that are copied to each reader."""
        if (segment.index, turn) in self.ran:
            return
        self.ran.add((segment.index, turn))
        self._have(segment, turn)
        split = bool(segment.block.inner_looped)
        weights = self._weights_of(segment)
        operands = tuple(self._get(value, turn, split) for value in segment.values)
        more = ((), turn) if turn != _ALL else ()
        made = self.writer.emit(nodes.forward, segment.index, weights, operands, *more, segment=segment)
        for index, value in enumerate(segment.outputs):
            if turn > 0 and value in self.kinds.once:
                continue
            node = self.writer.emit(operator.getitem, made, index, segment=segment)
            kind = _ALL if value in self.kinds.once else turn
            self._describe(node, str(value), self.captured.specs[value.node], split, kind)
            if turn == _ALL:
                self.layouts[value, bool(node.meta["split"])] = node
            else:
                self.values[value, turn] = node
        self._send(segment, turn)

    def _have(self, segment: Segment, turn: int) -> None:
        """Write what must be here before a segment runs in a turn."""
        for value in segment.values:
            maker = self.maker_of.get(value)
            if maker is None or not self.stages.runs(maker):
                continue
            if maker in self.kinds.early:
                self._forward(maker, _ALL)
            elif self.stages.runs_on[maker.index] != self.stages.runs_on[segment.index]:
                self._forward(maker, 0 if value in self.kinds.once else turn)

    def _send(self, segment: Segment, turn: int) -> None:
        rank = self.stages.rank
        sent = [value for value in segment.outputs if self.borders.sender(value) == rank and self._leaves_in(value, turn)]
        for to in sorted({to for value in sent for to in self._receivers(value)}):
            values = tuple(self._in_turn(value, turn) for value in sent if to in self._receivers(value))
            message = self.writer.emit(nodes.send, values, to)
            if turn != _ALL and self.goes_back:  # when its gradients are back, it has arrived
                message.meta["until"] = nodes.backward, turn

    def _receivers(self, value: Value) -> list[int]:
        """The ranks that need a value in a turn. Losses are sent at the end."""
        return [] if value in self.losses else self.borders.receivers(value)

    def _leaves_in(self, value: Value, turn: int) -> bool:
        return turn <= 0 or value not in self.kinds.once

    def _in_turn(self, value: Value, turn: int) -> fx.Node:
        return self.values[value, turn] if turn != _ALL else self._shared(value, False)

    def _arriving(self, segment: Segment, turn: int) -> list[Value]:
        """The values that another rank sends to this one in a turn, when it has run a segment."""
        return [v for v in segment.outputs if self.stages.rank in self._receivers(v) and self._leaves_in(v, turn)]

    def _receive(self, segment: Segment, turn: int) -> None:
        """Receive what a segment of another rank makes in a turn."""
        if (segment.index, turn) in self.received:
            return
        self.received.add((segment.index, turn))
        arriving, is_split = self._arriving(segment, turn), bool(segment.block.inner_looped)
        specs = [(str(value), self.captured.specs[value.node]) for value in arriving]
        found = self.writer.received(self.borders.sender(arriving[0]), specs, [is_split] * len(arriving), segment)
        for value, node in zip(arriving, found, strict=True):
            self._describe(node, str(value), node.meta["spec"], is_split, _ALL if value in self.kinds.once else turn)
            if turn == _ALL:
                self.layouts[value, bool(node.meta["split"])] = node
            else:
                self.values[value, turn] = node

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _backward_turn(self, action: Action) -> None:
        own = set(self._of_stage(action.stage))
        for segment in reversed(self.kinds.turned):
            if segment.index not in self.backwards:
                continue
            if segment in own:
                self._backward(segment, action.turn)
            elif not self.stages.runs(segment):
                self._receive_gradients(segment, action.turn)

    def _go_back(self, segments: Sequence[Segment]) -> None:
        """The gradients of segments that run once, or what other ranks send of them, in the order of the program."""
        for segment in reversed(segments):
            if segment.index in self.backwards:
                if not self.stages.runs(segment):
                    self._receive_gradients(segment, _ALL)
                else:
                    self._backward(segment, _ALL)

    def _is_complete(self, turn: int) -> bool:
        """Whether sums over the turns are complete in a turn."""
        return turn in (_ALL, self.turns - 1)

    def _backward(self, segment: Segment, turn: int) -> None:
        block, is_last = segment.block, self._is_complete(turn)
        split = bool(block.inner_looped)
        if segment in self.kinds.late:
            operands = self._before_the_turns(segment)
        else:
            operands = tuple(self._get(value, turn, split) for value in segment.values)
        weights = self._weights_of(segment)
        arrived = tuple(self._gradient(value, turn, split) for value in segment.outputs)
        more = ((), None, None, turn) if turn != _ALL else ()
        made = self.writer.emit(nodes.backward, segment.index, weights, operands, arrived, *more, segment=segment)
        sent: dict[int, list[fx.Node]] = {}
        for index, (value, spec) in enumerate(zip(segment.values, block.values, strict=True)):
            is_part = split and spec.splits
            if not spec.differentiable or not (is_part or is_last):
                continue
            node = self.writer.emit(operator.getitem, made, index, segment=segment)
            self._describe(node, f"d {value}", spec.detached(), split, turn if is_part else _ALL)
            if self.borders.is_made_here(value):
                self._add(value, turn if is_part else _ALL, node)
            else:
                sent.setdefault(self.borders.sender(value), []).append(node)
        for rank, gradients in sorted(sent.items()):
            message = self.writer.emit(nodes.send, tuple(gradients), rank)
            # the other rank goes forward in this turn when it has gone back with these
            message.meta["until"] = nodes.forward, turn + self.stages.ranks - rank
        if block.is_trained and is_last:
            bundle = self.writer.emit(operator.getitem, made, len(segment.values), segment=segment)
            self.writer.emit(nodes.push_gradients, segment.index, bundle, segment=segment)

    def _receive_gradients(self, segment: Segment, turn: int) -> None:
        """Receive the gradients that a segment of another rank makes in a turn."""
        if (segment.index, turn) in self.returned:
            return
        self.returned.add((segment.index, turn))
        (source, *_), block = self.stages.runs_on[segment.index], segment.block
        wanted = []
        for value, spec in zip(segment.values, block.values, strict=True):
            is_part = bool(block.inner_looped) and spec.splits
            mine = value in self.borders.makers and self.borders.sender(value) == self.stages.rank
            if spec.differentiable and mine and (is_part or self._is_complete(turn)):
                wanted.append((value, spec, is_part))
        if not wanted:
            return
        specs = [(f"d {value}", spec.detached()) for value, spec, _ in wanted]
        arrived = self.writer.received(source, specs, [is_part for *_, is_part in wanted], segment)
        for (value, spec, is_part), node in zip(wanted, arrived, strict=True):
            self._describe(node, f"d {value}", spec.detached(), is_part, turn if is_part else _ALL)
            self._add(value, turn if is_part else _ALL, node)

    def _add(self, value: Value, turn: int, node: fx.Node) -> None:
        """Add a gradient to those of a value in a turn, in the layout of the first one."""
        before = self.gradients.get((value, turn))
        if before is not None:
            turned = before.meta.get("turn")
            node = self.writer.derived(nodes.accumulate, before, self.writer.converted(node, before.meta["split"]))
            if turned is not None:
                node.meta["turn"] = turned
        self.gradients[value, turn] = node

    def _gradient(self, value: Value, turn: int, split: bool) -> fx.Node | None:
        """The gradient of an output for a turn; None if it has none."""
        of_turn, shared = self.gradients.get((value, turn)), self.gradients.get((value, _ALL))
        if of_turn is None and shared is not None:
            wanted = split and self.captured.specs[value.node].batch is not None
            of_turn = self.gradients[value, _ALL] = self.writer.converted(shared, wanted)
        elif of_turn is not None and shared is not None and turn != _ALL:
            raise L2LError(
                f"schedule='1f1b': '{value}' has gradients from turns and from a segment that reads all rows: {REMEDY}"
            )
        return of_turn

    # ---- segments that read all rows ---------------------------------------------------------------------------------

    def _before_the_turns(self, segment: Segment) -> tuple[fx.Node, ...]:
        """Operands for the gradients of a segment that reads all rows, before the turns have made them.

        Raises `L2LError` if the gradients may depend on what cannot be had yet.
        """
        block = segment.block
        unknown = {i for i, value in enumerate(segment.values, len(block.weights)) if not self._is_known(value)}
        operation = nonlinear_operation(block, unknown)
        if operation is not None or block.is_trained:
            raise L2LError(
                f"schedule='1f1b': segment '{segment.name}' reads all rows, and "
                + (f"'{operation}' in it is not linear in them" if operation is not None else "has parameters")
                + f", so that no micro-batch can go back before the last one has come: {REMEDY}"
            )
        return tuple(self._early(value, spec) for value, spec in zip(segment.values, block.values, strict=True))

    def _is_known(self, value: Value) -> bool:
        """Whether a value can be had before the turns: it has no gradient, and depends on inputs alone."""
        if value in self.inputs:
            return True
        maker, spec = self.maker_of.get(value), self.captured.specs[value.node]
        if maker is None or spec.differentiable:
            return maker is None
        if maker in self.kinds.early:
            return True
        count, index = len(maker.block.weights), maker.outputs.index(value)
        read = made_of(maker.block, index)
        is_part = value in self.kinds.parts and read is not None
        return is_part and all(i >= count and maker.values[i - count] in self.inputs for i in read or ())

    def _early(self, value: Value, spec: TensorSpec) -> fx.Node:
        """A value before the turns: itself if it can be had, else its sizes."""
        if not self._is_known(value):
            return self.writer.describe(self.writer.emit(nodes.blank), str(value), spec, False)
        maker = self.maker_of.get(value)
        if maker is None or maker in self.kinds.early:
            if maker is not None:
                self._forward(maker, _ALL)
            return self._shared(value, False)
        return self._made_early(maker, value)

    def _made_early(self, maker: Segment, value: Value) -> fx.Node:
        """One result of a segment that runs turn by turn, of inputs alone, for all turns at once."""
        index, count = maker.outputs.index(value), len(maker.block.weights)
        read = made_of(maker.block, index)
        operands = []
        for position, (each, spec) in enumerate(zip(maker.values, maker.block.values, strict=True), count):
            if position in (read or ()):
                operands.append(self._shared(each, spec.batch is not None))
            else:
                operands.append(self.writer.describe(self.writer.emit(nodes.blank), str(each), spec, True))
        weights = self._weights_of(maker)
        made = self.writer.emit(nodes.forward, maker.index, weights, tuple(operands), (), None, (index,), segment=maker)
        node = self.writer.emit(operator.getitem, made, index, segment=maker)
        self.layouts[value, True] = self.writer.describe(node, value, self.captured.specs[value.node], True)
        return self._shared(value, False)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _losses(self) -> dict[Value, fx.Node]:
        """Segments that read all rows, and the losses, on the device."""
        for segment in self.kinds.late:
            if self.stages.runs(segment):
                self._forward(segment, _ALL)
            elif self._arriving(segment, _ALL):
                self._receive(segment, _ALL)
        outputs = [value for value in dict.fromkeys(self.compilation.outputs) if value is not None]
        here = [value for value in outputs if not has_rows(self.compilation, value)]  # rows are on another rank
        return {value: self._loss(value) for value in here}

    def _loss(self, value: Value) -> fx.Node:
        if self.borders.is_made_here(value):
            if (maker := self.maker_of.get(value)) is not None and maker in self.kinds.early:
                self._forward(maker, _ALL)
            node = self._shared(value, False)
            for to in self.borders.receivers(value) if self.borders.sender(value) == self.stages.rank else ():
                self.writer.emit(nodes.send, (node,), to)
        else:
            maker = self.maker_of[value]
            (node,) = self.writer.received(
                self.borders.sender(value), [(str(value), self.captured.specs[value.node])], [False], maker
            )
        return node
