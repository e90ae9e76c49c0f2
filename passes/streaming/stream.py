"""Write the layer-streamed program.

Forward, for each segment in order:                    Backward, for each segment in reverse:

    %w  = fetch_weights(segment)                           %w  = fetch_weights(segment)
    %x' = split(%x)            where the form changes      %g  = backward(segment, %w, (stashes), (gradients))
    %y  = forward(segment, %w, (%x', ...))                 %gx = %g[0]; accumulate(...) where a value has more readers
    stash(%x)                  for what backward needs     push_gradients(segment, %g[-1])

Every fetch and restore stands right before its reader; later passes move them, choose where stashes live and say when
each value is released. A `Builder` keeps every value in the forms (whole, split) in which it was asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ...ir import nodes
from ...ir.captured import Captured
from ...ir.program import Segment, Value
from ...ir.values import TensorSpec
from ..compilation import Compilation, Fact
from .differentiate import reached_backward


@dataclass(frozen=True)
class Stream:
    """Provides `program`: the forward graph and, where something wants a gradient, the backward graph."""

    name: ClassVar = "stream"
    requires: ClassVar = frozenset({Fact.BATCHING, Fact.GRADIENTS})
    provides: ClassVar = frozenset({Fact.PROGRAM})

    def apply(self, compilation: Compilation) -> None:
        compilation.forward = _forward(compilation)
        if any(compilation.given):
            compilation.backward = _backward(compilation)


class Builder:
    """Writes program nodes and remembers which node holds a value, whole or split.

    Every node that stands for a tensor has `meta["spec"]` (a `TensorSpec`), `meta["split"]` and `meta["value"]`
    (the name of the value); nodes that belong to a segment have `meta["segment"]` (its index).
    """

    def __init__(self, captured: Captured):
        self.captured, self.graph = captured, fx.Graph()
        self.held: dict[tuple[Value, bool], fx.Node] = {}

    def emit(self, function: Callable, *args, segment: Segment | None = None) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta["segment"] = segment.index if segment else None
        return node

    def spec(self, value: Value) -> TensorSpec:
        """The description of a value; rows that were written into are not known to be equal."""
        spec = self.captured.specs[value.node]
        return replace(spec, equal_rows=False) if value.version else spec

    def describe(self, node: fx.Node, value: Value | str, spec: TensorSpec, split: bool) -> fx.Node:
        node.meta.update(value=str(value), spec=spec, split=split and spec.splits)
        return node

    def derived(self, function: Callable, source: fx.Node, *rest, split: bool | None = None) -> fx.Node:
        """A node with the description of its source, in the same form unless `split` says otherwise."""
        node = self.emit(function, source, *rest)
        form = source.meta["split"] if split is None else split
        return self.describe(node, source.meta["value"], source.meta["spec"], form)

    def convert(self, node: fx.Node, split: bool) -> fx.Node:
        """The node, cut or joined if it is not in the wanted form. A value without rows has one form only."""
        if node.meta["split"] == split or not node.meta["spec"].splits:
            return node
        return self.derived(nodes.split if split else nodes.merge, node, split=split)

    def hold(self, value: Value, node: fx.Node) -> None:
        self.held[value, node.meta["split"]] = node

    def holds(self, value: Value) -> bool:
        return (value, False) in self.held or (value, True) in self.held

    def get(self, value: Value, split: bool) -> fx.Node:
        """The node that holds a value in a form; written now if there is only the other form."""
        split = split and self.captured.specs[value.node].batch is not None
        if (value, split) not in self.held:
            self.held[value, split] = self.convert(self.held[value, not split], split)
        return self.held[value, split]

    def any_form(self, value: Value) -> fx.Node:
        """The node that holds a value in the form in which it was made; a sum over rows in its whole."""
        if self.captured.specs[value.node].partial is not None:
            return self.get(value, False)
        return next(self.held[value, form] for form in (True, False) if (value, form) in self.held)

    def input(self, name: str, spec: TensorSpec, split: bool, kind: str) -> fx.Node:
        """A placeholder: an input of the captured graph, a stash or a gradient, on the host unless a pass moves it."""
        node = self.graph.placeholder(name)
        node.target = node.name  # unique, where the values "x_1" and "x", version 1, meet
        node.meta.update(segment=None, kind=kind, host=True)
        return self.describe(node, name, spec, split)


def _forward(compilation: Compilation) -> fx.Graph:
    captured, build = compilation.captured, Builder(compilation.captured)
    inputs = {
        i.node: build.input(i.node.name, captured.specs[i.node], False, "input")
        for i in captured.inputs
        if not i.is_weight and i.node in captured.specs
    }
    outputs, only_returned = compilation.outputs, _only_returned(compilation)
    wanted, returned = set(outputs), {}
    for segment in compilation.segments:
        for value in segment.values:
            if value.version == 0 and value.node in inputs and not build.holds(value):
                build.hold(value, build.derived(nodes.restore, inputs[value.node]))
        sent = _run_forward(build, segment, only_returned[segment.index])
        for value in segment.outputs:
            if value in wanted:
                returned[value] = sent.get(value) or build.derived(nodes.offload, build.any_form(value))
    writes = _write_backs(compilation, build)
    stashes = tuple(_stash(build, inputs, value) for value in compilation.gradients.kept)
    build.graph.output((tuple(map(returned.get, outputs)), stashes, tuple(writes)))
    return build.graph


def _only_returned(compilation: Compilation) -> list[tuple[int, ...]]:
    """For each segment, indices of the outputs that are for the user alone and are made micro-batch by micro-batch."""
    outputs = set(compilation.outputs)
    last_reader = {value: segment.index for segment in compilation.segments for value in segment.values}

    def of(segment: Segment) -> tuple[int, ...]:
        return tuple(
            i
            for i, (value, spec) in enumerate(zip(segment.outputs, segment.block.outputs, strict=True))
            if value in outputs
            and last_reader.get(value, -1) <= segment.index
            and not value.version
            and spec.batch is not None
            and not spec.equal_rows
        )

    return [of(segment) if segment.block.inner_looped else () for segment in compilation.segments]


def _run_forward(build: Builder, segment: Segment, send: tuple[int, ...]) -> dict[Value, fx.Node]:
    """Write the nodes of a segment; the outputs that are on the host then."""
    split = segment.block.inner_looped
    weights = build.emit(nodes.fetch_weights, segment.index, segment=segment) if segment.weights else None
    operands = tuple(build.get(v, split) for v in segment.values)
    made = build.emit(nodes.forward, segment.index, weights, operands, *([send] if send else []), segment=segment)
    sent = {}
    for index, value in enumerate(segment.outputs):
        node = build.emit(operator.getitem, made, index, segment=segment)
        build.describe(node, value, build.spec(value), split)
        if index in send:
            node.meta["host"] = True
            sent[value] = node
        else:
            build.hold(value, node)
    return sent


def _write_backs(compilation: Compilation, build: Builder) -> list[fx.Node]:
    """New contents of buffers and inputs that the model writes into go back to the host, once, when all has run.

    Those with a gradient (`carried`) are outputs instead.
    """
    newest, carried = {}, compilation.carried
    index_of = {i.node: i.index for i in compilation.captured.inputs}
    for segment in compilation.segments:
        for value in segment.outputs:
            if value.version and value.node in index_of:
                newest[value.node] = value
    back = [value for value in newest.values() if value not in carried]
    return [build.emit(nodes.write_back, index_of[v.node], build.get(v, False)) for v in back]


def _stash(build: Builder, inputs: dict[fx.Node, fx.Node], value: Value) -> fx.Node:
    if value.version == 0 and value.node in inputs:
        return inputs[value.node]  # still on the host
    return build.derived(nodes.stash, build.any_form(value))


def _backward(compilation: Compilation) -> fx.Graph:
    build = Builder(compilation.captured)
    specs, given = compilation.captured.specs, compilation.given
    kept = zip(compilation.gradients.kept, compilation.forward.output_node().args[0][1], strict=True)
    forms = {value: node.meta["split"] for value, node in kept}
    stashes = {
        value: build.input(f"stash_{_identifier(value)}", build.spec(value), forms[value], "stash")
        for value in compilation.gradients.kept
    }
    for value, placeholder in stashes.items():
        placeholder.meta["value"] = str(value)
    gradients = Builder(compilation.captured)
    gradients.graph = build.graph
    brought = _brought(compilation)
    on_host: dict[Value, fx.Node] = {}
    for index, (value, wanted) in enumerate(zip(compilation.outputs, given, strict=True)):
        if wanted:
            arrived = build.input(f"gradient_{index}", specs[value.node].detached(), False, "gradient")
            if value in brought:
                on_host[value] = arrived
            else:
                _add(gradients, value, build.derived(nodes.restore, arrived))
    roots = [v for v, wanted in zip(compilation.outputs, given, strict=True) if wanted]
    for segment in reversed(reached_backward(compilation.segments, roots)):
        _run_backward(build, gradients, stashes, segment, on_host)
    inputs = [Value(i.node) for i in compilation.captured.inputs if i.kind == "value"]
    build.graph.output(
        tuple(gradients.derived(nodes.offload, gradients.get(v, False)) if gradients.holds(v) else None for v in inputs)
    )
    return build.graph


def _brought(compilation: Compilation) -> set[Value]:
    """The outputs whose gradients go to the device micro-batch by micro-batch; not where the whole is needed as well."""
    roots = [v for v, wanted in zip(compilation.outputs, compilation.given, strict=True) if wanted]
    alone = {
        segment.outputs[i]
        for segment, indices in zip(compilation.segments, _only_returned(compilation), strict=True)
        if not segment.block.summed_whole
        for i in indices
    }
    return {v for v in alone if roots.count(v) == 1}


def _run_backward(
    build: Builder, gradients: Builder, stashes: dict[Value, fx.Node], segment: Segment, on_host: dict[Value, fx.Node]
) -> None:
    split, block = segment.block.inner_looped, segment.block
    for value in segment.values:
        if not build.holds(value):
            build.hold(value, build.derived(nodes.restore, stashes[value]))
    weights = build.emit(nodes.fetch_weights, segment.index, segment=segment) if segment.weights else None
    operands = tuple(build.get(v, split) for v in segment.values)
    arrived = tuple(gradients.get(v, split) if gradients.holds(v) else on_host.get(v) for v in segment.outputs)
    brought = tuple(i for i, v in enumerate(segment.outputs) if v in on_host)
    made = build.emit(nodes.backward, segment.index, weights, operands, arrived, *([brought] if brought else []), segment=segment)
    for index, (value, spec) in enumerate(zip(segment.values, block.values, strict=True)):
        if spec.differentiable:
            node = build.emit(operator.getitem, made, index, segment=segment)
            _add(gradients, value, build.describe(node, f"d {value}", spec.detached(), split))
    if any(spec.differentiable for spec in block.weights):
        bundle = build.emit(operator.getitem, made, len(segment.values), segment=segment)
        build.emit(nodes.push_gradients, segment.index, bundle, segment=segment)


def _add(gradients: Builder, value: Value, node: fx.Node) -> None:
    """One more gradient of a value: the sum so far is kept in the form in which the first one came."""
    held = [(value, form) for form in (False, True) if (value, form) in gradients.held]
    if not held:
        gradients.hold(value, node)
        return
    before = gradients.held[held[0]]
    for key in held:
        del gradients.held[key]
    total = gradients.derived(nodes.accumulate, before, gradients.convert(node, before.meta["split"]))
    gradients.hold(value, total)


def _identifier(value: Value) -> str:
    return f"{value.node.name}_{value.version}" if value.version else value.node.name
