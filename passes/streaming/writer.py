"""`GraphWriter` writes program nodes into a graph; `Layouts` records in which layouts (whole, split) it holds each value.

Every node that stands for a tensor has `meta["spec"]` (a `TensorSpec`), `meta["split"]` and `meta["value"]` (the name of
the value); nodes that belong to a segment have `meta["segment"]` (its index).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.ir.values import TensorSpec


class GraphWriter:
    """Writes nodes into a graph, each with its description."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def emit(self, function: Callable, *operands: Any, segment: Segment | None = None) -> fx.Node:
        """A node at the end of the graph."""
        node = self.graph.call_function(function, operands)
        node.meta["segment"] = segment.index if segment else None
        return node

    def describe(self, node: fx.Node, value: Value | str, spec: TensorSpec, split: bool) -> fx.Node:
        """Mark a node as a tensor of this value, spec and layout. Only batched values and partial sums are ever split."""
        node.meta.update(value=str(value), spec=spec, split=split and spec.splits)
        return node

    def derived(self, function: Callable, source: fx.Node, *operands: Any, split: bool | None = None) -> fx.Node:
        """A node with the description of its source, in the same layout unless `split` says otherwise."""
        node = self.emit(function, source, *operands)
        layout = source.meta["split"] if split is None else split
        return self.describe(node, source.meta["value"], source.meta["spec"], layout)

    def converted(self, node: fx.Node, split: bool) -> fx.Node:
        """The node, split or merged if it is not in the wanted layout. Only batched values and partial sums have two layouts."""
        if node.meta["split"] == split or not node.meta["spec"].splits:
            return node
        return self.derived(nodes.split if split else nodes.merge, node, split=split)

    def received(
        self, source: int, specs: Sequence[tuple[str, TensorSpec]], layouts: Sequence[bool], segment: Segment
    ) -> list[fx.Node]:
        """What a segment makes on another rank of the pipeline: values, each with its name, spec and layout (whether it is split)."""
        together = self.emit(nodes.recv, source, segment=segment)
        picked = [self.emit(operator.getitem, together, index, segment=segment) for index in range(len(specs))]
        described = zip(picked, specs, layouts, strict=True)
        return [self.describe(node, name, spec, is_split) for node, (name, spec), is_split in described]

    def placeholder(self, name: str, value: Value | str, spec: TensorSpec, split: bool, kind: str) -> fx.Node:
        """An input of the captured graph, a stash or a gradient, on the host unless a pass moves it."""
        node = self.graph.placeholder(name)
        node.target = node.name  # unique, also if the names of "x_1" and of "x" in version 1 are equal
        node.meta.update(segment=None, kind=kind, host=True)
        return self.describe(node, value, spec, split)


class Layouts:
    """The nodes that hold each value, whole or split. A layout that does not exist yet is written at the first request.

    `specs` are the specs of the captured graph: `get` gives a value without the batch dimension whole.
    """

    def __init__(self, writer: GraphWriter, specs: Mapping[fx.Node, TensorSpec]):
        self._writer, self._specs = writer, specs
        self._held: dict[Value, dict[bool, fx.Node]] = {}  # by value, then by whether it is split

    def __contains__(self, value: Value) -> bool:
        return value in self._held

    def hold(self, value: Value, node: fx.Node) -> None:
        """Record that a node holds a value, in the layout of the node."""
        self._held.setdefault(value, {})[node.meta["split"]] = node

    def get(self, value: Value, split: bool) -> fx.Node:
        """The node that holds a value in a layout. It is written now if only the other layout exists."""
        split = split and self._specs[value.node].batch is not None
        held = self._held[value]
        if split not in held:
            held[split] = self._writer.converted(held[not split], split)
        return held[split]

    def as_made(self, value: Value) -> fx.Node:
        """The node that holds a value in the layout in which it was made. A sum over rows is whole."""
        if self._specs[value.node].partial is not None:
            return self.get(value, False)
        held = self._held[value]
        return held[True] if True in held else held[False]

    def add(self, value: Value, node: fx.Node) -> None:
        """Add a summand to a value. The sum keeps the layout in which the first summand came."""
        if value not in self._held:
            self.hold(value, node)
            return
        held = self._held.pop(value)
        before = held[False] if False in held else held[True]
        summand = self._writer.converted(node, before.meta["split"])
        self.hold(value, self._writer.derived(nodes.accumulate, before, summand))
