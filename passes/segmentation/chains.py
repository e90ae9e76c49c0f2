"""The data flow between the copies of a repeat: which copy reads which, and which operations are connected.

    tower(a), tower(b)        L L L L L L L L      a run of eight equal copies
                              └─chain─┘ └─chain─┘   two chains: the fifth copy reads no value of the fourth

The *predecessor* of a copy is an earlier copy whose values reach at least half of the parameters that the copy uses. Copies
that read their predecessors in the same way are a chain. A copy whose parameters are used by operations that are not
connected is no layer: it is two, or the end of one tower and the beginning of another.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from ..operation_sequence import OperationSequence, ParameterUse
from .repeats import ranges_between

_REACHED = 0.5  # share of a copy's uses of parameters that values of its predecessor have to reach


def uses_in(sequence: OperationSequence, span: range) -> list[ParameterUse]:
    """The uses of parameters in a range of the sequence."""
    first = bisect.bisect_left(sequence.uses, span.start, key=lambda u: u.position)
    last = bisect.bisect_left(sequence.uses, span.stop, key=lambda u: u.position)
    return sequence.uses[first:last]


@dataclass(frozen=True)
class ReadKind:
    """A value that one operation makes and another one reads, by the targets of the two."""

    maker: str
    reader: str


@dataclass(frozen=True)
class Predecessor:
    """The index of the copy that another one reads, and the kinds of its reads."""

    index: int
    reads: frozenset[ReadKind]


def chains(sequence: OperationSequence, copies: list[range]) -> list[list[int]]:
    """The copies, by index, as chains of copies and their predecessors, each in order; every copy is in one of them."""
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
    """Whether a copy reads the last one of a chain in a way in which that one reads the copy before it."""
    return len(chain) == 1 or bool(predecessors[index].reads & predecessors[chain[-1]].reads)


def find_predecessors(sequence: OperationSequence, copies: list[range]) -> dict[int, Predecessor]:
    """The predecessor of each copy that has one: the latest, where there are several."""
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
    """The kinds of reads of values that earlier copies make, by copy."""
    found: dict[int, set[ReadKind]] = {}
    for position in copy:
        reader = sequence.nodes[position]
        for read in sequence.reads[position]:
            maker = copy_of.get(read, index)
            if maker < index and read in sequence.captured.specs:
                found.setdefault(maker, set()).add(ReadKind(str(read.target), str(reader.target)))
    return found


def extended_to_next(spans: list[range]) -> list[range]:
    """Ranges in order, each extended to the beginning of the next one: operations in between belong to the one before."""
    return [range(a.start, b.start) for a, b in itertools.pairwise(spans)] + spans[-1:]


def _reaches_most(sequence: OperationSequence, maker: range, copy: range) -> bool:
    """Whether the values that one range made reach at least half of another's uses of parameters.

    Uses of parameters that no value from outside reaches do not count.
    """
    from_outside = _reached(sequence, copy, lambda position: position not in copy)
    from_maker = _reached(sequence, copy, lambda position: position in maker)
    uses = [use for use in uses_in(sequence, copy) if use.position in from_outside]
    return bool(uses) and sum(use.position in from_maker for use in uses) >= _REACHED * len(uses)


def _reached(sequence: OperationSequence, copy: range, is_source: Callable[[int], bool]) -> set[int]:
    """The operations of a copy that depend on the result of a source; inputs of the graph have the position -1.

    Values that are computed from the model alone, such as the norm of a weight, are no inputs.
    """
    reached: set[int] = set()
    for position in copy:
        reads = [sequence.position.get(read, -1) for read in sequence.reads[position] if read not in sequence.of_model]
        if any(read in reached or is_source(read) for read in reads):
            reached.add(position)
    return reached


def components(sequence: OperationSequence, copy: range) -> list[range]:
    """The connected components of a range, by the values made in it, if each uses parameters and they follow one another.

    The range itself where all its operations are connected; nothing where components are interleaved.
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
    """The reads within a range as edges between positions; `positions` are in it in any case."""
    graph = nx.Graph()
    graph.add_nodes_from(positions)
    for position in copy:
        makers = (sequence.position.get(read, -1) for read in sequence.reads[position])
        graph.add_edges_from((position, maker) for maker in makers if maker in copy)
    return graph


def _cheapest(sequence: OperationSequence, choices: range) -> int:
    return min(choices, key=lambda cut: (sequence.crossing[cut], -cut))
