"""Free every weight slab and every value of the device right after its last reader.

    push_gradients(i, %g)              push_gradients(i, %g)
    backward(i - 1)              =>    backward(i - 1)
                                       release(%g)

Memory is freed by the compute lane, which waits there for every copy that reads it. A copy to the host therefore gets
the time of the next segment before its source is freed: the compute lane would stand still for each copy otherwise. With
`prefetch` = 0 it does: no copy overlaps then, and memory is freed at once.

A value that forward stashes on the device is not released there: backward releases it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...ir import nodes
from ..compilation import Compilation, Fact


@dataclass(frozen=True)
class Release:
    """Provides `released`."""

    name: ClassVar[str] = "release"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RANKS_PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    def apply(self, compilation: Compilation) -> None:
        for graph in filter(None, (compilation.forward, compilation.backward)):
            _release_all(graph, overlap=compilation.options.prefetch > 0)


def _release_all(graph: fx.Graph, overlap: bool) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in sorted(_released(graph), key=lambda n: not _is_copied(n)):
        # what is placed first stands last: a slab must not wait for a copy of another value
        ends = [_end(reader) if overlap else reader for reader in node.users]
        last = max(ends, key=order.__getitem__, default=node)
        last = _after_results(last, order)
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        with graph.inserting_after(last):
            graph.call_function(nodes.release, (node,)).meta["segment"] = None


def _released(graph: fx.Graph) -> list[fx.Node]:
    """What is to be released, in the order of the graph."""
    return [n for n in graph.nodes if nodes.holds_device_memory(n) and not nodes.is_kept(n)]


def _is_copied(node: fx.Node) -> bool:
    """Whether a copy to the host, or a collective, reads it."""
    return any(nodes.lane_of(user) in (nodes.D2H, nodes.COMM) for user in node.users)


def _end(reader: fx.Node) -> fx.Node:
    """The node behind which a reader does not hold compute up any more: a copy or a collective has the time of the next segment."""
    if nodes.lane_of(reader) not in (nodes.D2H, nodes.COMM):
        return reader
    later = reader.next
    while later.op != "output" and not nodes.runs_segment(later):
        later = later.next
    return reader if later.op == "output" else later


def _after_results(node: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """Releases stand behind the picks of a segment's results, so that a result that nobody reads is there to free."""
    if nodes.runs_segment(node):
        return max((u for u in node.users if u.target is operator.getitem), key=order.__getitem__, default=node)
    return node
