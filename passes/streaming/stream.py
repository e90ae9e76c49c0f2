"""Write the layer-streamed program.

Forward, for each segment in order:                    Backward, for each segment in reverse:

    %w  = fetch_weights(segment)                           %w  = fetch_weights(segment)
    %x' = split(%x)            where the layout changes    %g  = backward(segment, %w, (stashes), (gradients))
    %y  = forward(segment, %w, (%x', ...))                 %gx = %g[0]; accumulate(...) where a value has more readers
    stash(%x)                  if backward needs it        push_gradients(segment, %g[-1])

Every fetch and restore stands right before its reader. Later passes move them, choose where stashes are kept, and place
the release of each value.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.ir.stages import Borders
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.differentiate import reached_backward
from l2l_compile.passes.streaming.place_stages import borders_of
from l2l_compile.passes.streaming.writer import GraphWriter, Layouts


@dataclass(frozen=True)
class Stream:
    """Provides `program`: the forward graph and, if an output has a gradient, the backward graph."""

    name: ClassVar[str] = "stream"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BATCHING, Fact.STAGES_PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PROGRAM})

    def apply(self, compilation: Compilation) -> None:
        compilation.forward = _Forward(compilation).write()
        if any(compilation.gradient_mask):
            compilation.backward = _Backward(compilation).write()


class _Forward:
    """Writes the forward graph."""

    def __init__(self, compilation: Compilation):
        self.compilation, self.captured = compilation, compilation.captured
        self.writer = GraphWriter()
        self.values = Layouts(self.writer, self.captured.specs)
        self.index_of = {i.node: i.index for i in self.captured.inputs}
        self.grown = _grown(self.captured)
        self.readers = Counter(value for segment in compilation.segments for value in segment.values)
        self.inputs: dict[fx.Node, fx.Node] = {}  # placeholders, by the input of the captured graph
        self.streamed = streamed_outputs(compilation)
        self.returned = dict.fromkeys(compilation.outputs)
        self.written = {value.node for segment in compilation.segments for value in segment.outputs if value.version}
        self.borders = borders_of(compilation)

    def write(self) -> fx.Graph:
        for value in self.captured.inputs:
            if not value.is_weight and value.node in self.captured.specs:
                spec, name = self.captured.specs[value.node], value.node.name
                self.inputs[value.node] = self.writer.placeholder(name, name, spec, False, "input")
        returned: dict[Value, fx.Node] = {}
        for segment in self.compilation.segments:
            if self.compilation.stages.runs(segment):
                self._restore_inputs(segment)
                returned |= self._run(segment)
                self._send(segment)
            else:
                returned |= self._receive(segment)
        writes = tuple(self._write_backs())
        self._keep_results()
        stashes = tuple(self._stash(value) for value in self.compilation.gradients.kept)
        outputs = tuple(returned.get(value) if value is not None else None for value in self.compilation.outputs)
        self.writer.graph.output((outputs, stashes, writes))
        return self.writer.graph

    def _restore_inputs(self, segment: Segment) -> None:
        for value in segment.values:
            if self._is_input(value) and value not in self.values:
                self.values.hold(value, self._to_device(value, bool(segment.block.inner_looped)))

    def _to_device(self, value: Value, split: bool) -> fx.Node:
        """The copy of an input; what may be there from an earlier call, in the layout of its first reader."""
        source = self.inputs[value.node]
        if not self._may_be_there(value):
            return self.writer.derived(nodes.restore, source)
        node = self.writer.derived(nodes.recall, source, split=split)
        if value.node not in self.written and value.node not in self.grown:
            self.writer.derived(nodes.keep_input, node, self.index_of[value.node])
        return node

    def _may_be_there(self, value: Value) -> bool:
        """Whether an input may be kept on the device. Tokens and masks are new in each call. One segment reads it as it comes."""
        kept = self.captured.specs[value.node].dtype.is_floating_point or value.node in self.written
        return kept and self.compilation.keeps_inputs and self.readers[value] == 1

    def _keep_results(self) -> None:
        """Keep what the host does not get whole, and what the model has written, for the next call."""
        if not self.compilation.keeps_inputs:
            return
        for position, value in self.compilation.kept_outputs.items():
            if value in self.values:
                self.writer.derived(nodes.keep_output, self.values.as_made(value), position)
        for value in self._newest_writes():
            self.writer.derived(nodes.keep_input, self.values.as_made(value), self.index_of[value.node])

    def _is_input(self, value: Value) -> bool:
        """Whether a value is an input of the captured graph that no segment has written into."""
        return value.version == 0 and value.node in self.inputs

    def _run(self, segment: Segment) -> dict[Value, fx.Node]:
        """Write the nodes of a segment. Returns the outputs that the captured graph returns, as nodes on the host."""
        split = bool(segment.block.inner_looped)
        weights = self.writer.emit(nodes.fetch_weights, segment.index, segment=segment) if segment.weights else None
        operands = tuple(self.values.get(v, split) for v in segment.values)
        streamed = self.streamed[segment.index]
        optional = (streamed,) if streamed else ()
        made = self.writer.emit(nodes.forward, segment.index, weights, operands, *optional, segment=segment)
        on_host = {}
        for index, value in enumerate(segment.outputs):
            node = self.writer.emit(operator.getitem, made, index, segment=segment)
            self.writer.describe(node, value, _spec(self.captured.specs, value), split)
            if index in streamed:
                node.meta["host"] = True
                on_host[value] = node
            else:
                self.values.hold(value, node)
        wanted = [v for v in segment.outputs if v in self.returned and v not in on_host]
        return on_host | {v: self.writer.derived(nodes.offload, self.values.as_made(v)) for v in wanted}

    def _send(self, segment: Segment) -> None:
        """Send what a segment has made to the ranks that read it."""
        rank = self.compilation.stages.rank
        sent = [value for value in segment.outputs if self.borders.sender(value) == rank]
        for to in sorted({to for value in sent for to in self.borders.receivers(value)}):
            values = tuple(self.values.as_made(value) for value in sent if to in self.borders.receivers(value))
            self.writer.emit(nodes.send, values, to)

    def _receive(self, segment: Segment) -> dict[Value, fx.Node]:
        """Receive what a segment of another rank makes, as it makes it. Returns as `_run`."""
        rank, is_split = self.compilation.stages.rank, bool(segment.block.inner_looped)
        arriving = [value for value in segment.outputs if rank in self.borders.receivers(value)]
        if not arriving:
            return {}
        specs = [(str(value), _spec(self.captured.specs, value)) for value in arriving]
        layouts, source = [is_split and spec.partial is None for _, spec in specs], self.borders.sender(arriving[0])
        for value, node in zip(arriving, self.writer.received(source, specs, layouts, segment), strict=True):
            self.values.hold(value, node)
        wanted = [value for value in arriving if value in self.returned]
        return {value: self.writer.derived(nodes.offload, self.values.as_made(value)) for value in wanted}

    def _write_backs(self) -> list[fx.Node]:
        """Write the new contents of buffers and inputs back to the host, once, after the last segment.

        New contents with a gradient (`carried`) are outputs instead. Writes that the host makes itself are not among them.
        """
        by_host = self.captured.parts.writes
        back = [value for value in self._newest_writes() if self.index_of[value.node] not in by_host]
        return [self.writer.emit(nodes.write_back, self.index_of[v.node], self.values.get(v, False)) for v in back]

    def _newest_writes(self) -> list[Value]:
        """The new contents of written inputs, without `carried`."""
        newest = {}
        for segment in self.compilation.segments:
            for value in segment.outputs:
                if value.version and value.node in self.index_of:
                    newest[value.node] = value
        carried = self.compilation.carried
        return [value for value in newest.values() if value not in carried and value in self.values]

    def _stash(self, value: Value) -> fx.Node:
        if self._is_input(value):
            return self.inputs[value.node]  # still on the host
        return self.writer.derived(nodes.stash, self.values.as_made(value))


class _Backward:
    """Writes the backward graph for the outputs that have a gradient."""

    def __init__(self, compilation: Compilation):
        self.compilation, self.captured = compilation, compilation.captured
        self.writer = GraphWriter()
        self.values = Layouts(self.writer, self.captured.specs)
        self.gradients = Layouts(self.writer, self.captured.specs)
        self.stashes: dict[Value, fx.Node] = {}
        self.on_host: dict[Value, fx.Node] = {}  # gradients that come to the device micro-batch by micro-batch
        self.borders = borders_of(compilation)

    def write(self) -> fx.Graph:
        self._take_stashes()
        self._take_gradients()
        roots = with_gradient(self.compilation)
        for segment in reversed(reached_backward(self.compilation.segments, roots)):
            if self.compilation.stages.runs(segment):
                self._restore_stashes(segment)
                self._run(segment)
            else:
                self._receive(segment)
        inputs = [Value(i.node) for i in self.captured.inputs if i.kind == "value"]
        self.writer.graph.output(tuple(self._to_host(v) if v in self.gradients else None for v in inputs))
        return self.writer.graph

    def _take_stashes(self) -> None:
        kept, left = self.compilation.gradients.kept, nodes.returned(self.compilation.forward).stashes
        for value, node in zip(kept, left, strict=True):
            name, spec = f"stash_{_identifier(value)}", _spec(self.captured.specs, value)
            self.stashes[value] = self.writer.placeholder(name, value, spec, node.meta["split"], "stash")

    def _take_gradients(self) -> None:
        streamed = _streamed_gradients(self.compilation)
        for value, arrived in taken_gradients(self.compilation, self.writer, self.borders):
            if value in streamed:
                self.on_host[value] = arrived
            else:
                self.gradients.add(value, self.writer.derived(nodes.restore, arrived))

    def _restore_stashes(self, segment: Segment) -> None:
        for value in segment.values:
            if value not in self.values:
                self.values.hold(value, self.writer.derived(nodes.restore, self.stashes[value]))

    def _run(self, segment: Segment) -> None:
        made = self._emit(segment)
        split, block = bool(segment.block.inner_looped), segment.block
        sent: dict[int, list[fx.Node]] = {}  # gradients of values that another rank has made, by rank
        for index, (value, spec) in enumerate(zip(segment.values, block.values, strict=True)):
            if spec.differentiable:
                node = self.writer.emit(operator.getitem, made, index, segment=segment)
                self.writer.describe(node, f"d {value}", spec.detached(), split)
                if self.borders.is_made_here(value):
                    self.gradients.add(value, node)
                else:
                    sent.setdefault(self.borders.sender(value), []).append(node)
        for rank, gradients in sorted(sent.items()):
            self.writer.emit(nodes.send, tuple(gradients), rank)
        if block.is_trained:
            bundle = self.writer.emit(operator.getitem, made, len(segment.values), segment=segment)
            self.writer.emit(nodes.push_gradients, segment.index, bundle, segment=segment)

    def _receive(self, segment: Segment) -> None:
        """Receive the gradients that a segment of another rank makes, and add them in the order of the one program."""
        (source, *_), split = self.compilation.stages.runs_on[segment.index], bool(segment.block.inner_looped)
        read = zip(segment.values, segment.block.values, strict=True)
        wanted = [(v, spec) for v, spec in read if spec.differentiable and self._is_sent_here(v)]
        specs = [(f"d {value}", spec.detached()) for value, spec in wanted]
        if wanted:
            arrived = self.writer.received(source, specs, [split] * len(specs), segment)
            for (value, _), node in zip(wanted, arrived, strict=True):
                self.gradients.add(value, node)

    def _is_sent_here(self, value: Value) -> bool:
        """Whether the ranks that read a value send its gradient to this one."""
        return value in self.borders.makers and self.borders.sender(value) == self.compilation.stages.rank

    def _emit(self, segment: Segment) -> fx.Node:
        split = bool(segment.block.inner_looped)
        weights = self.writer.emit(nodes.fetch_weights, segment.index, segment=segment) if segment.weights else None
        operands = tuple(self.values.get(v, split) for v in segment.values)
        arrived = tuple(self.gradients.get(v, split) if v in self.gradients else None for v in segment.outputs)
        streamed = tuple(self.on_host.get(v) for v in segment.outputs)
        optional = (streamed,) if any(node is not None for node in streamed) else ()
        return self.writer.emit(nodes.backward, segment.index, weights, operands, arrived, *optional, segment=segment)

    def _to_host(self, value: Value) -> fx.Node:
        return self.writer.derived(nodes.offload, self.gradients.get(value, False))


def taken_gradients(compilation: Compilation, writer: GraphWriter, borders: Borders) -> Iterator[tuple[Value, fx.Node]]:
    """Write a placeholder for the gradient of each output that has one. Yields those of values that this rank makes."""
    for index, (value, wanted) in enumerate(zip(compilation.outputs, compilation.gradient_mask, strict=True)):
        if value is None or not wanted:
            continue
        name, spec = f"gradient_{index}", compilation.captured.specs[value.node].detached()
        arrived = writer.placeholder(name, name, spec, False, "gradient")
        if borders.is_made_here(value):
            yield value, arrived
        else:
            arrived.meta["elsewhere"] = True


def streamed_outputs(compilation: Compilation) -> list[tuple[int, ...]]:
    """For each segment, the indices of the outputs that only the user reads and that are made micro-batch by micro-batch."""
    returned = set(compilation.outputs)
    last_reader = {value: segment.index for segment in compilation.segments for value in segment.values}

    def is_streamed(segment: Segment, value: Value, spec: TensorSpec) -> bool:
        if value not in returned or last_reader.get(value, -1) > segment.index:
            return False
        is_written = value.version > 0
        return not is_written and spec.batch is not None and not spec.equal_rows

    def of(segment: Segment) -> tuple[int, ...]:
        outputs = enumerate(zip(segment.outputs, segment.block.outputs, strict=True))
        return tuple(index for index, (value, spec) in outputs if is_streamed(segment, value, spec))

    return [of(segment) if segment.block.inner_looped else () for segment in compilation.segments]


def _streamed_gradients(compilation: Compilation) -> set[Value]:
    """The outputs whose gradients go to the device micro-batch by micro-batch.

    An output is excluded if its segment also sums gradients over the whole batch (`summed_whole`), or if it is returned twice.
    """
    roots = with_gradient(compilation)
    alone = {
        segment.outputs[index]
        for segment, indices in zip(compilation.segments, streamed_outputs(compilation), strict=True)
        if not segment.block.summed_whole
        for index in indices
    }
    return {value for value in alone if roots.count(value) == 1}


def with_gradient(compilation: Compilation) -> list[Value]:
    """The outputs of the captured graph that have a gradient."""
    return [v for v, wanted in zip(compilation.outputs, compilation.gradient_mask, strict=True) if v is not None and wanted]


def _grown(captured: Captured) -> set[fx.Node]:
    """The inputs that come back with more entries, as outputs: after the call, nobody needs them as they were."""
    read = {index for replay in captured.parts.outputs.values() for index in replay.reads()}
    return {i.node for i in captured.inputs if i.index in read}


def _spec(specs: dict[fx.Node, TensorSpec], value: Value) -> TensorSpec:
    """The spec of a value. After a write, its rows are not known to be equal."""
    spec = specs[value.node]
    return replace(spec, equal_rows=False) if value.version else spec


def _identifier(value: Value) -> str:
    return f"{value.node.name}_{value.version}" if value.version else value.node.name
