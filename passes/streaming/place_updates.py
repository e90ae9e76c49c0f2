"""Write the host's updates of parameters into the program, with the option `update="in_backward"` or `"in_forward"`.

    in_backward                                      in_forward

    %p = push_gradients(segment, %g)                 %u = update(segment)            for all segments, at the start
         update(segment, %p)                         %w = fetch_weights(segment, %u)

In forward, the updates stand at the start. The host lane runs them in order, as far ahead of the device as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.update_modes import UpdatePlace


@dataclass(frozen=True)
class PlaceUpdates:
    """Provides `updates_placed`."""

    name: ClassVar[str] = "place_updates"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATES_PLACED})

    def apply(self, compilation: Compilation) -> None:
        place = compilation.options.mode.place
        if place is UpdatePlace.AFTER_PUSH and compilation.backward is not None:
            _after_pushes(compilation.backward)
        if place is UpdatePlace.BEFORE_FETCH:
            for graph in filter(None, (compilation.forward, compilation.step)):
                _before_fetches(graph, compilation)


def _after_pushes(graph: fx.Graph) -> None:
    for push in graph.find_nodes(op="call_function", target=nodes.push_gradients):
        with graph.inserting_after(push):
            update = graph.call_function(nodes.update, (nodes.operands(push).segment, push))
        update.meta["segment"] = nodes.operands(push).segment


def _before_fetches(graph: fx.Graph, compilation: Compilation) -> None:
    start = next(n for n in graph.nodes if n.op != "placeholder")
    for fetch in sorted(nodes.fetches(graph), key=lambda n: nodes.operands(n).segment):
        index = nodes.operands(fetch).segment
        if compilation.segments[index].block.is_trained:
            with graph.inserting_before(start):
                update = graph.call_function(nodes.update, (index,))
            update.meta["segment"] = index
            nodes.set_operands(fetch, after=update)
