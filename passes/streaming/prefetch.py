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

from l2l_compile.ir import nodes
from l2l_compile.lanes import Lane
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.place_stash import segment_times


@dataclass(frozen=True)
class Prefetch:
    """Provides `prefetched`."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STASHES_PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCHED})

    def apply(self, compilation: Compilation) -> None:
        for graph in filter(None, (compilation.forward, compilation.backward)):
            _hoist(graph, compilation.options.prefetch)


def _hoist(graph: fx.Graph, ahead: int) -> None:
    """Move each copy to the device in front of the segment that runs `ahead` segments before its reader."""
    times = segment_times(graph)
    runs = [node for node in graph.nodes if nodes.runs_segment(node)]
    copies = [node for node in graph.nodes if nodes.lane_of(node) == Lane.H2D]
    first_reader = {node: min((times[user] for user in node.users), default=times[node]) for node in copies}
    for node in copies:
        target = max(first_reader[node] - ahead, 0)
        if target < len(runs) and times[node] > target and _defined_before(node, runs[target], times):
            runs[target].prepend(node)


def _defined_before(node: fx.Node, place: fx.Node, times: dict[fx.Node, int]) -> bool:
    return all(read.op == "placeholder" or times[read] < times[place] for read in node.all_input_nodes)
