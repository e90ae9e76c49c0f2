"""Free every weight slab and every value of the device right after its last reader.

    push_gradients(i, %g)              push_gradients(i, %g)
    backward(i - 1)              =>    backward(i - 1)
                                       release(%g)

The compute lane frees memory, and first waits for every copy that reads it. The source of a copy to the host is therefore
released after the next segment, during which the copy can run; otherwise the compute lane would wait idle for each copy. With
`prefetch` = 0 it does wait: no copy overlaps then, and memory is freed at once.

A value that forward stashes on the device is not released there: backward releases it. A value that may stay for the next call
is kept or released where its release would stand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.lanes import Lane
from l2l_compile.passes.compilation import Compilation, Fact

_AWAY = (Lane.D2H, Lane.COMM, Lane.SEND)  # lanes that read a value while the next segment is computed


@dataclass(frozen=True)
class Release:
    """Provides `released`."""

    name: ClassVar[str] = "release"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RANKS_PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    def apply(self, compilation: Compilation) -> None:
        for graph in compilation.graphs:
            _release_all(graph, overlap=compilation.options.prefetch > 0)


def _release_all(graph: fx.Graph, overlap: bool) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target in nodes.KEEPS]:
        _last_reader(nodes.operands(node).x, order, overlap, but=node).append(node)
    for node in sorted(_released(graph), key=lambda n: not _is_copied(n)):
        # of the releases at one place, the first to be placed stands last: a slab must not wait for a copy of another value
        with graph.inserting_after(_last_reader(node, order, overlap)):
            graph.call_function(nodes.release, (node,)).meta["segment"] = None


def _last_reader(node: fx.Node, order: dict[fx.Node, int], overlap: bool, but: fx.Node | None = None) -> fx.Node:
    """The node behind which the memory of `node` is needed no longer."""
    ends = [_end(reader) if overlap or "until" in reader.meta else reader for reader in node.users if reader is not but]
    last = _after_results(max(ends, key=order.__getitem__, default=node), order)
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    return last


def _released(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose memory must be released, in the order of the graph."""
    return [n for n in graph.nodes if nodes.holds_device_memory(n) and not nodes.is_kept(n)]


def _is_copied(node: fx.Node) -> bool:
    """Whether a copy to the host, a collective or a message reads a node."""
    return any(nodes.lane_of(user) in _AWAY for user in node.users)


def _end(reader: fx.Node) -> fx.Node:
    """The node after which a reader no longer delays the compute lane.

    For a copy, a collective or a message, it is the next segment (if any), during which the reader runs. Otherwise it is the reader.
    """
    if nodes.lane_of(reader) not in _AWAY:
        return reader
    if "until" in reader.meta:
        return _before_turn(reader, *reader.meta["until"])
    later = reader.next
    while later.op != "output" and not nodes.runs_segment(later):
        later = later.next
    return reader if later.op == "output" else later


def _before_turn(message: fx.Node, function: Callable, turn: int) -> fx.Node:
    """The last node before a segment runs forward, or back, in a turn or a later one: a message has arrived then."""
    later = message.next
    while later.op != "output" and not (later.target is function and _is_in(later, turn)):
        later = later.next
    last = later.prev
    while last.target is nodes.release:
        last = last.prev
    return last


def _is_in(run: fx.Node, turn: int) -> bool:
    of_run = nodes.operands(run).turn
    return of_run is not None and of_run >= turn


def _after_results(node: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The last `getitem` of a segment's results, or `node` itself: a result without readers must exist before its release."""
    if nodes.runs_segment(node):
        return max((u for u in node.users if u.target is operator.getitem), key=order.__getitem__, default=node)
    return node
