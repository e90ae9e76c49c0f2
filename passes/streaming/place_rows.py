"""`ranks="global"`: the batch is that of all ranks together, and a rank is one more level of micro-batches.

A value of the device is in one of three states. A batched value has this rank's own rows. Another one is the same on all ranks, or it
is a part: the sum over all ranks is the value. Segments that run row by row read and make own rows, and parts of sums. Segments
that mix rows run on all rows, alike on every rank:

    %y = forward(mixing, %w, (%x))        =>      %a = gather_rows(%x)
                                                  %y = forward(mixing, %w, (%a))
                                                  %o = own_rows(%y)

    %m = merge(%parts)    a sum over rows =>      %m = merge(%parts);  %s = sum_ranks(%m)

A gradient without rows is a part behind a segment that runs row by row, and the same on all ranks behind one that mixes rows, or from
the user. Where the other state is needed, `sum_ranks` makes a part the same everywhere, and `count_once` makes a part of what is the same.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...errors import L2LError
from ...ir import nodes
from ...ir.segments import Segment
from ...ir.values import TensorSpec
from ..compilation import Compilation, Fact


class State(enum.Enum):
    """Of a gradient without rows."""

    SAME = "the same on all ranks"
    PART = "a part of the sum over all ranks"


@dataclass(frozen=True)
class PlaceRows:
    """Provides `rows_placed`."""

    name: ClassVar[str] = "place_rows"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCHED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.ROWS_PLACED})

    def apply(self, compilation: Compilation) -> None:
        if not compilation.is_global:
            return
        for graph in filter(None, (compilation.forward, compilation.backward)):
            _Rows(graph, compilation.segments).place()


def check_rows(compilation: Compilation) -> None:
    """Raise `L2LError` if the batch is that of all ranks together, and it is not known where its rows are."""
    captured = compilation.captured
    if not compilation.is_global:
        return
    if captured.batch is None:
        raise L2LError(f"ranks='global' needs a batch whose rows are known, but {captured.why_static}: use ranks='mean'")
    for value in captured.inputs:
        if value.kind == "value" and value.node in captured.specs and captured.specs[value.node].mixed:
            raise L2LError(
                f"ranks='global' joins the rows of all ranks, and input '{value.name}' of shape {captured.specs[value.node]} has no "
                "dimension of rows of its own: make it in the model, or use ranks='mean'"
            )


class _Rows:
    """Writes the collectives on values of one graph."""

    def __init__(self, graph: fx.Graph, segments: list[Segment]):
        self.graph, self.segments = graph, segments
        self.states: dict[fx.Node, State] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # of all rows, by the node that has this rank's

    def place(self) -> None:
        for node in list(self.graph.nodes):
            if nodes.runs_segment(node):
                self._run(node, self.segments[nodes.operands(node).segment])
            elif node.target is nodes.merge and node.meta["spec"].batch is None:
                self._behind(node, nodes.sum_ranks)
            elif node.target is nodes.accumulate:
                self._accumulate(node)
            elif node.target is nodes.offload and self._state(nodes.operands(node).x) is State.PART:
                nodes.set_operands(node, x=self._as(State.SAME, nodes.operands(node).x, node))

    def _run(self, node: fx.Node, segment: Segment) -> None:
        block, mixes = segment.block, not segment.block.inner_looped
        if mixes:
            values = zip(nodes.operands(node).values, block.values, strict=True)
            nodes.set_operands(node, values=tuple(self._all_rows(x, spec, node) for x, spec in values))
        if node.target is nodes.backward:
            arriving = zip(nodes.operands(node).gradients, block.outputs, strict=True)
            nodes.set_operands(node, gradients=tuple(self._arriving(g, spec, mixes, node) for g, spec in arriving))
        for made in [user for user in node.users if user.target is operator.getitem and "spec" in user.meta]:
            if made.meta["spec"].batch is None:
                self.states[made] = State.SAME if mixes or node.target is nodes.forward else State.PART
            elif mixes:
                self._behind(made, nodes.own_rows)

    def _arriving(self, gradient: fx.Node | None, spec: TensorSpec, mixes: bool, reader: fx.Node) -> fx.Node | None:
        """The gradient of an output in the form in which the segment takes it."""
        if gradient is None:
            return None
        if spec.batch is not None:
            return self._all_rows(gradient, spec, reader) if mixes else gradient
        # every part of a sum has the gradient of the sum; a value that a rank makes for itself counts once over all ranks
        return self._as(State.SAME if mixes or spec.partial is not None else State.PART, gradient, reader)

    def _all_rows(self, own: fx.Node, spec: TensorSpec, reader: fx.Node) -> fx.Node:
        if spec.batch is None:
            return own
        if own not in self.whole:
            self.whole[own] = self._before(reader, nodes.gather_rows, own)
        return self.whole[own]

    def _accumulate(self, node: fx.Node) -> None:
        a, b = nodes.operands(node).a, nodes.operands(node).b
        if node.meta["spec"].batch is not None:
            return
        state = State.SAME if self._state(a) is self._state(b) is State.SAME else State.PART
        nodes.set_operands(node, a=self._as(state, a, node), b=self._as(state, b, node))
        self.states[node] = state

    def _state(self, node: fx.Node) -> State:
        """What is copied has the state of its source; what comes from outside is the same on all ranks."""
        while node not in self.states and node.target in (nodes.restore, nodes.offload, nodes.stash):
            node = nodes.operands(node).x
        return self.states.get(node, State.SAME)

    def _as(self, state: State, node: fx.Node, reader: fx.Node) -> fx.Node:
        if self._state(node) is state:
            return node
        made = self._before(reader, nodes.sum_ranks if state is State.SAME else nodes.count_once, node)
        self.states[made] = state
        return made

    def _before(self, reader: fx.Node, function: Callable, source: fx.Node) -> fx.Node:
        with self.graph.inserting_before(reader):
            return _like(self.graph.call_function(function, (source,)), source)

    def _behind(self, source: fx.Node, function: Callable) -> None:
        """All that reads the source reads what is made from it."""
        with self.graph.inserting_after(source):
            made = _like(self.graph.call_function(function, (source,)), source)
        source.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _like(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta.update({key: old.meta[key] for key in ("spec", "split", "value")}, segment=None)
    return new
