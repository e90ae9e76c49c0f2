"""`batch_scope="global"`: the batches of all ranks form one batch, and the ranks are one more level of micro-batches.

A value on the device is in one of three states. A batched value has this rank's own rows. A value without rows is either the
same on all ranks, or a part: the sum over all ranks is the value. Segments that run row by row read and make this rank's rows
and parts of sums. Segments that mix rows run on the rows of all ranks, identically on every rank:

    %y = forward(mixing, %w, (%x))        =>      %a = all_gather_rows(%x)
                                                  %y = forward(mixing, %w, (%a))
                                                  %o = local_rows(%y)

    %m = merge(%parts)    a sum over rows =>      %m = merge(%parts);  %s = all_reduce(%m)

A gradient without rows is a part if a segment that runs row by row makes it. It is the same on all ranks if a segment that
mixes rows makes it, or if it comes from the user. Where a reader needs the other state, `all_reduce` turns a part into a value
that is the same on all ranks, and `mask_to_first_rank` turns such a value into a part.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.compilation import Compilation, Fact


class GradientState(enum.Enum):
    """The state of a gradient without rows."""

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
        for graph in compilation.graphs:
            _Rows(graph, compilation.segments).place()


def check_rows(compilation: Compilation) -> None:
    """Raise `L2LError` with `batch_scope="global"` if the place of the rows is unknown in the graph or in one of its inputs."""
    captured = compilation.captured
    if not compilation.is_global:
        return
    if captured.batch is None:
        raise L2LError(
            f"batch_scope='global' needs a batch whose rows are known, but {captured.why_static}: use batch_scope='per_rank'"
        )
    for value in captured.inputs:
        if value.kind == "value" and value.node in captured.specs and captured.specs[value.node].mixed:
            raise L2LError(
                f"batch_scope='global' joins the rows of all ranks, and input '{value.name}' of shape {captured.specs[value.node]} has no "
                "dimension of rows of its own: make it in the model, or use batch_scope='per_rank'"
            )


class _Rows:
    """Writes the collectives on values of one graph."""

    def __init__(self, graph: fx.Graph, segments: list[Segment]):
        self.graph, self.segments = graph, segments
        self.states: dict[fx.Node, GradientState] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # the node with all rows, by the node with this rank's rows

    def place(self) -> None:
        for node in list(self.graph.nodes):
            if nodes.runs_segment(node):
                self._run(node, self.segments[nodes.operands(node).segment])
            elif node.target is nodes.merge and node.meta["spec"].batch is None:
                self._behind(node, nodes.all_reduce)
            elif node.target is nodes.accumulate:
                self._accumulate(node)
            elif node.target is nodes.offload and self._state(nodes.operands(node).x) is GradientState.PART:
                nodes.set_operands(node, x=self._as(GradientState.SAME, nodes.operands(node).x, node))

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
                self.states[made] = GradientState.SAME if mixes or node.target is nodes.forward else GradientState.PART
            elif mixes:
                self._behind(made, nodes.local_rows)

    def _arriving(self, gradient: fx.Node | None, spec: TensorSpec, mixes: bool, reader: fx.Node) -> fx.Node | None:
        """The gradient of an output, with the rows and in the state that the segment needs."""
        if gradient is None:
            return None
        if spec.batch is not None:
            return self._all_rows(gradient, spec, reader) if mixes else gradient
        # the gradient of a sum is the gradient of each of its parts; the gradient of any other value counts once over all ranks
        return self._as(GradientState.SAME if mixes or spec.partial is not None else GradientState.PART, gradient, reader)

    def _all_rows(self, own: fx.Node, spec: TensorSpec, reader: fx.Node) -> fx.Node:
        if spec.batch is None:
            return own
        if own not in self.whole:
            self.whole[own] = self._before(reader, nodes.all_gather_rows, own)
        return self.whole[own]

    def _accumulate(self, node: fx.Node) -> None:
        a, b = nodes.operands(node).a, nodes.operands(node).b
        if node.meta["spec"].batch is not None:
            return
        state = GradientState.SAME if self._state(a) is self._state(b) is GradientState.SAME else GradientState.PART
        nodes.set_operands(node, a=self._as(state, a, node), b=self._as(state, b, node))
        self.states[node] = state

    def _state(self, node: fx.Node) -> GradientState:
        """The state of a value. A copy has the state of its source; a value from outside is the same on all ranks."""
        while node not in self.states and node.target in (nodes.restore, nodes.offload, nodes.stash, nodes.store, nodes.load):
            node = nodes.operands(node).x
        return self.states.get(node, GradientState.SAME)

    def _as(self, state: GradientState, node: fx.Node, reader: fx.Node) -> fx.Node:
        if self._state(node) is state:
            return node
        made = self._before(reader, nodes.all_reduce if state is GradientState.SAME else nodes.mask_to_first_rank, node)
        self.states[made] = state
        return made

    def _before(self, reader: fx.Node, function: Callable, source: fx.Node) -> fx.Node:
        with self.graph.inserting_before(reader):
            return _like(self.graph.call_function(function, (source,)), source)

    def _behind(self, source: fx.Node, function: Callable) -> None:
        """Insert `function(source)` after the source, and let all readers of the source read its result instead."""
        with self.graph.inserting_after(source):
            made = _like(self.graph.call_function(function, (source,)), source)
        source.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _like(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta.update({key: old.meta[key] for key in ("spec", "split", "value")}, segment=None)
    return new
