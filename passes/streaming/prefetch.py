"""Start copies to the device early: `prefetch` segments before their reader.

    forward(i - 1)                    %w = fetch_weights(i)
    %w = fetch_weights(i)      =>     forward(i - 1)
    forward(i, %w)                    forward(i, %w)

The copy then runs while segment i - 1 computes. With `prefetch` = p, at most p + 1 segments' weights are on the
device at once. `prefetch` = 0 leaves every copy right before its reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...ir import nodes
from ..compilation import Compilation, Fact
from .place_stash import segment_times


@dataclass(frozen=True)
class Prefetch:
    """Provides `prefetched`."""

    name: ClassVar = "prefetch"
    requires: ClassVar = frozenset({Fact.STASHES_PLACED})
    provides: ClassVar = frozenset({Fact.PREFETCHED})

    def apply(self, compilation: Compilation) -> None:
        for graph in filter(None, (compilation.forward, compilation.backward)):
            _hoist(graph, compilation.options.prefetch)


def _hoist(graph: fx.Graph, ahead: int) -> None:
    times = segment_times(graph)
    runs = [n for n in graph.nodes if n.target in (nodes.forward, nodes.backward)]
    fetched = [n for n in graph.nodes if n.target is nodes.fetch_weights]
    for node in list(graph.nodes):
        if node.target is nodes.fetch_weights:
            index = fetched.index(node) if ahead else 0
            reader = next(iter(node.users))
            limit = times[next(iter(fetched[index - ahead - 1].users))] + 1 if index > ahead else 0
            target = max(times[reader] - ahead, limit, 0)
        elif node.target is nodes.restore:
            target = max(_first_segment(times, node) - ahead, 0)
        else:
            continue
        if target >= len(runs):  # it is for what comes behind the last segment: a value that is only written back
            continue
        place = runs[target]
        if times[node] > target and _defined_before(node, place, times):
            place.prepend(node)


def _first_segment(times: dict[fx.Node, int], node: fx.Node) -> int:
    """The index of the first segment that a restored value is for, looking through split, merge and accumulate."""
    return min(times[u] for u in node.users) if node.users else times[node]


def _defined_before(node: fx.Node, place: fx.Node, times: dict[fx.Node, int]) -> bool:
    return all(a.op == "placeholder" or times[a] < times[place] for a in node.all_input_nodes)
