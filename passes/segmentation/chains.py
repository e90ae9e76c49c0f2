"""The data flow between the copies of a repeat: which copy reads which other copy, and which operations are connected.

    tower(a), tower(b)        L L L L L L L L      a run of eight equal copies
                              └─chain─┘ └─chain─┘   two chains: the fifth copy reads no value of the fourth

The *predecessor* of a copy is an earlier copy whose values reach at least half of the parameters that the copy uses. Copies
that read their predecessors in the same way form a chain. If the operations that use a copy's parameters are not connected,
the copy is no layer: it holds two layers, or the end of one tower and the beginning of another.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from l2l_compile.passes.operation_sequence import OperationSequence, ParameterUse
from l2l_compile.passes.segmentation.repeats import ranges_between

_REACHED = 0.5  # share of a copy's uses of parameters that the values of its predecessor must reach


def uses_in(sequence: OperationSequence, span: range) -> list[ParameterUse]:
    """The uses of parameters in a range of the sequence."""
    first = bisect.bisect_left(sequence.uses, span.start, key=lambda u: u.position)
    last = bisect.bisect_left(sequence.uses, span.stop, key=lambda u: u.position)
    return sequence.uses[first:last]


@dataclass(frozen=True)
class ReadKind:
    """The targets of the operation that makes a value, and of the operation that reads it."""

    maker: str
    reader: str


@dataclass(frozen=True)
class Predecessor:
    """The predecessor of a copy, by index, and the kinds of the copy's reads of its values."""

    index: int
    reads: frozenset[ReadKind]


def chains(sequence: OperationSequence, copies: list[range]) -> list[list[int]]:
    """The chains of copies, by index: in a chain, each copy follows its predecessor. Every copy is in exactly one chain."""
    predecessors = find_predecessors(sequence, copies)
    found: list[list[int]] = []
    chain_that_ends_with: dict[int, list[int]] = {}
    for index in range(len(copies)):
        predecessor = predecessors.get(index)
        chain = chain_that_ends_with.get(predecessor.index) if predecessor is not None else None
        if chain is not None and _continues(chain, index, predecessors):
            del chain_that_ends_with[chain[-1]]
        else:
            chain = []
            found.append(chain)
        chain.append(index)
        chain_that_ends_with[index] = chain
    return found


def _continues(chain: list[int], index: int, predecessors: dict[int, Predecessor]) -> bool:
    """Whether a copy reads the last copy of a chain as that copy reads its own predecessor, with a common kind of read.

    Always true for a chain of one copy.
    """
    return len(chain) == 1 or bool(predecessors[index].reads & predecessors[chain[-1]].reads)


def find_predecessors(sequence: OperationSequence, copies: list[range]) -> dict[int, Predecessor]:
    """The predecessor of each copy that has one. If several copies qualify, the latest is the predecessor."""
    copy_of = {sequence.nodes[position]: index for index, copy in enumerate(copies) for position in copy}
    found = {}
    for index, copy in enumerate(copies):
        reads = _reads_of_earlier(sequence, copy, index, copy_of)
        for maker in sorted(reads, reverse=True):
            if _reaches_most(sequence, copies[maker], copy):
                found[index] = Predecessor(maker, frozenset(reads[maker]))
                break
    return found


def _reads_of_earlier(
    sequence: OperationSequence, copy: range, index: int, copy_of: dict[fx.Node, int]
) -> dict[int, set[ReadKind]]:
    """For each earlier copy whose values this copy reads, the kinds of these reads."""
    found: dict[int, set[ReadKind]] = {}
    for position in copy:
        reader = sequence.nodes[position]
        for read in sequence.reads[position]:
            maker = copy_of.get(read, index)
            if maker < index and read in sequence.captured.specs:
                found.setdefault(maker, set()).add(ReadKind(str(read.target), str(reader.target)))
    return found


def extended_to_next(spans: list[range]) -> list[range]:
    """Ranges in order, each extended to the beginning of the next: operations in between belong to the earlier range."""
    return [range(a.start, b.start) for a, b in itertools.pairwise(spans)] + spans[-1:]


def _reaches_most(sequence: OperationSequence, maker: range, copy: range) -> bool:
    """Whether the values that `maker` makes reach at least half of the parameter uses in `copy`.

    Parameter uses that no value from outside the copy reaches do not count.
    """
    from_outside = _reached(sequence, copy, lambda position: position not in copy)
    from_maker = _reached(sequence, copy, lambda position: position in maker)
    uses = [use for use in uses_in(sequence, copy) if use.position in from_outside]
    return bool(uses) and sum(use.position in from_maker for use in uses) >= _REACHED * len(uses)


def _reached(sequence: OperationSequence, copy: range, is_source: Callable[[int], bool]) -> set[int]:
    """The operations of a copy that depend on the result of a source; inputs of the graph have the position -1.

    Weights and states of the model are no inputs, so an operation that reads only them (the norm of a weight) is not reached.
    """
    reached: set[int] = set()
    for position in copy:
        reads = [sequence.position.get(read, -1) for read in sequence.reads[position] if read not in sequence.of_model]
        if any(read in reached or is_source(read) for read in reads):
            reached.add(position)
    return reached


def components(sequence: OperationSequence, copy: range) -> list[range]:
    """A range cut into its connected components. Two operations are connected if one reads a value that the other makes.

    Only components that use parameters count; the cheapest cut separates two of them. The result is the range itself if there
    are fewer than two components, and empty if components are interleaved.
    """
    uses = {use.position for use in uses_in(sequence, copy)}
    connected = nx.connected_components(_data_flow(sequence, copy, uses))
    with_uses = [component for component in connected if not uses.isdisjoint(component)]
    spans = sorted((range(min(component), max(component) + 1) for component in with_uses), key=lambda span: span.start)
    if any(after.start < before.stop for before, after in itertools.pairwise(spans)):
        return []
    cuts = [_cheapest(sequence, range(a.stop, b.start + 1)) for a, b in itertools.pairwise(spans)]
    return ranges_between([copy.start, *cuts, copy.stop])


def _data_flow(sequence: OperationSequence, copy: range, positions: set[int]) -> nx.Graph:
    """The reads within a range, as edges between positions. `positions` are always nodes, also without edges."""
    graph = nx.Graph()
    graph.add_nodes_from(positions)
    for position in copy:
        makers = (sequence.position.get(read, -1) for read in sequence.reads[position])
        graph.add_edges_from((position, maker) for maker in makers if maker in copy)
    return graph


def _cheapest(sequence: OperationSequence, choices: range) -> int:
    return min(choices, key=lambda cut: (sequence.crossing[cut], -cut))
