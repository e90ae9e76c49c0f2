"""Start copies to the device early: `prefetch` segments before their reader.

    forward(i - 1)                    %w = fetch_weights(i)
    %w = fetch_weights(i)      =>     forward(i - 1)
    forward(i, %w)                    forward(i, %w)

The copy then runs while segment i - 1 computes. With `prefetch` = p, at most p + 1 segments' weights are on the
device at once. `prefetch` = 0 leaves every copy right before its reader.

A value that is on the disk is read `DISK_AHEAD` segments before its copy to the device, so that at most `DISK_AHEAD` + 1 of them are in
memory of the host.

In a pipeline, a message from another rank is asked for one segment before its reader, so that its first micro-batches are there when
the reader begins. Messages keep their order, which is that of the one program of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.program import DISK_AHEAD
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
        for graph in compilation.graphs:
            _hoist(graph, compilation.options.prefetch)
            if compilation.options.prefetch:
                _hoist_messages(graph)


def _hoist(graph: fx.Graph, ahead: int) -> None:
    """Move each copy to the device in front of the segment that runs `ahead` segments before its reader."""
    times = segment_times(graph)
    runs = [node for node in graph.nodes if nodes.runs_segment(node)]
    copies = [node for node in graph.nodes if nodes.lane_of(node) == Lane.H2D]
    first_reader = {node: min((times[user] for user in node.users), default=times[node]) for node in copies}
    for node in copies:
        for loaded in [read for read in node.all_input_nodes if read.target is nodes.load]:
            _hoist_load(loaded, max(first_reader[node] - ahead - DISK_AHEAD, 0), runs, times)
    for node in copies:
        target = max(first_reader[node] - ahead, 0)
        if target < len(runs) and times[node] > target and _defined_before(node, runs[target], times):
            runs[target].prepend(node)


def _hoist_load(load: fx.Node, target: int, runs: Sequence[fx.Node], times: dict[fx.Node, int]) -> None:
    """Move a read from the disk in front of a segment, if it stands behind."""
    if target < min(len(runs), times[load]):
        runs[target].prepend(load)
        times[load] = target - 1  # it stands before the copies that are moved to the same place


def _hoist_messages(graph: fx.Graph) -> None:
    """Move each receive in front of the segment that runs before the first segment which reads it, behind all earlier receives."""
    times = segment_times(graph)
    runs = [node for node in graph.nodes if nodes.runs_segment(node)]
    earliest, pause = 0, nodes.pause_of(graph)
    for node in list(graph.nodes):
        if pause is not None and node is pause:
            earliest = max(earliest, times[node])  # what is received behind it is sent in the next call
        if node.target is not nodes.recv:
            continue
        results = sorted(node.users, key=lambda user: nodes.operands(user).index)
        first = min((times[user] for result in results for user in result.users), default=times[node])
        target = max(first - 1, earliest)
        if target < min(len(runs), times[node]):
            for moved in (node, *results):
                runs[target].prepend(moved)
        earliest = min(target, times[node])


def _defined_before(node: fx.Node, place: fx.Node, times: dict[fx.Node, int]) -> bool:
    return all(read.op == "placeholder" or times[read] < times[place] for read in node.all_input_nodes)
