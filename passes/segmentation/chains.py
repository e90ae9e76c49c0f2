"""What the copies of a repeat compute: which copy feeds which, what is handed on between them, what hangs together.

    tower(a), tower(b)        L L L L L L L L      a run of eight equal copies
                              └─chain─┘ └─chain─┘   two chains: the fifth copy reads nothing that the fourth made

A copy *feeds* a later one if values that it made reach at least half of the parameters that the later one uses. Copies that feed
one another in the same way are a chain. A copy whose parameters are used by parts that do not hang together is no layer: it
is two, or the end of one tower and the beginning of another.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from .operation_sequence import OperationSequence, ParameterUse, size_expression
from .repeats import ranges_between

_FED = 0.5  # part of a copy's uses of parameters that its predecessor's values have to reach


def uses_in(sequence: OperationSequence, span: range) -> list[ParameterUse]:
    """The uses of parameters in a range of the line."""
    first = bisect.bisect_left(sequence.uses, span.start, key=lambda u: u.position)
    last = bisect.bisect_left(sequence.uses, span.stop, key=lambda u: u.position)
    return sequence.uses[first:last]


@dataclass(frozen=True)
class Feed:
    """How a copy is fed: by which copy, and the kinds of its reads (target of the maker, target of the reader)."""

    by: int
    reads: frozenset[tuple]


def chains(sequence: OperationSequence, copies: list[range]) -> list[list[int]]:
    """The copies, by index, as chains of those that feed one another, each in order; every copy is in one of them."""
    how = feeds(sequence, copies)
    found: list[list[int]] = []
    ends: dict[int, list[int]] = {}  # the chain that ends with a copy
    for index in range(len(copies)):
        feed = how.get(index)
        chain = ends.pop(feed.by, None) if feed else None
        if chain is None or (len(chain) > 1 and not feed.reads & how[chain[-1]].reads):
            if chain is not None:
                ends[feed.by] = chain
            chain = []
            found.append(chain)
        chain.append(index)
        ends[index] = chain
    return found


def feeds(sequence: OperationSequence, copies: list[range]) -> dict[int, Feed]:
    """For each copy that is fed by an earlier one, the latest such copy."""
    made_in = {sequence.nodes[position]: index for index, copy in enumerate(copies) for position in copy}
    found = {}
    for index, copy in enumerate(copies):
        reads: dict[int, set[tuple]] = {}
        for position in copy:
            for read in sequence.reads[position]:
                maker = made_in.get(read, index)
                if maker < index and read in sequence.captured.specs:
                    reads.setdefault(maker, set()).add((str(read.target), str(sequence.nodes[position].target)))
        by = next((maker for maker in sorted(reads, reverse=True) if _reaches_most(sequence, copies[maker], copy)), None)
        if by is not None:
            found[index] = Feed(by, frozenset(reads[by]))
    return found


def up_to_the_next(spans: list[range]) -> list[range]:
    """Ranges in order, each prolonged to where the next one begins: what lies between belongs to the one before."""
    return [range(a.start, b.start) for a, b in itertools.pairwise(spans)] + spans[-1:]


def _reaches_most(sequence: OperationSequence, maker: range, copy: range) -> bool:
    """Whether the values that one range made reach at least half of another's uses of parameters.

    What is computed from the model alone, such as a weight's norm, counts for neither.
    """
    reached: set[int] = set()
    fed: set[int] = set()
    for position in copy:
        reads = [sequence.position.get(read, -1) for read in sequence.reads[position] if read not in sequence.of_model]
        if any(read in fed or read not in copy for read in reads):
            fed.add(position)
        if any(read in reached or read in maker for read in reads):
            reached.add(position)
    uses = [use for use in uses_in(sequence, copy) if use.position in fed]
    return bool(uses) and sum(use.position in reached for use in uses) >= _FED * len(uses)


def parts(sequence: OperationSequence, copy: range) -> list[range]:
    """A range as the parts that do not hang together, by the values made in it, if each uses parameters and they stand apart.

    The range itself where all hangs together; nothing where parts are interleaved.
    """
    uses = uses_in(sequence, copy)
    graph = nx.Graph()
    graph.add_nodes_from(use.position for use in uses)
    graph.add_edges_from(
        (position, made)
        for position in copy
        for read in sequence.reads[position]
        if (made := sequence.position.get(read, -1)) in copy
    )
    spans = []
    for component in nx.connected_components(graph):
        if any(use.position in component for use in uses):
            spans.append(range(min(component), max(component) + 1))
    spans.sort(key=lambda span: span.start)
    if any(after.start < before.stop for before, after in itertools.pairwise(spans)):
        return []
    cuts = [_cheapest(sequence, range(a.stop, b.start + 1)) for a, b in itertools.pairwise(spans)]
    return ranges_between([copy.start, *cuts, copy.stop])


def _cheapest(sequence: OperationSequence, choices: range) -> int:
    return min(choices, key=lambda cut: (sequence.crossing[cut], -cut))


def handed_on(sequence: OperationSequence, length: int, cuts: range) -> Callable[[int], int]:
    """How many values cross a cut, one of `cuts`, and are read within `length` operations behind it.

    What a model collects from every layer for its end does not count.
    """
    read_at: dict[fx.Node, list[int]] = {}
    for reader in range(cuts.start, min(cuts.stop - 1 + length, len(sequence))):
        for read in sequence.reads[reader]:
            read_at.setdefault(read, []).append(reader)
    if cuts.stop - 1 + length > len(sequence):
        for read in filter(sequence.position.__contains__, sequence.captured.outputs):
            read_at.setdefault(read, []).append(len(sequence))
    change = [0] * (len(cuts) + 1)
    for node, readers in read_at.items():
        if node not in sequence.position or node not in sequence.captured.specs:
            continue
        counted = max(
            cuts.start, sequence.position[node] + 1
        )  # cuts before this one are counted for this value, or lie before it
        for reader in readers:
            first, last = max(counted, reader - length + 1), min(reader, cuts.stop - 1)
            if first <= last:  # the reader is within reach of the cuts from first to last
                change[first - cuts.start] += 1
                change[last + 1 - cuts.start] -= 1
                counted = last + 1
    counts = list(itertools.accumulate(change))
    return lambda cut: counts[cut - cuts.start]


def narrow_between(sequence: OperationSequence, before: range, after: range) -> bool:
    """Whether no fewer values are handed on inside of one of two neighbours than between them.

    Two of four projections of one input are no layer: the other two follow where more values are alive than between
    the projections themselves. One range is enough, since the last one may be the last to read a mask.
    """
    count = handed_on(sequence, len(after), range(before.start, after.stop + 1))

    def inside(layer: range) -> list[int]:
        uses = uses_in(sequence, layer)
        choices = (range(a.position + 1, b.position + 1) for a, b in itertools.pairwise(uses) if a.position < b.position)
        return [min(c, key=sequence.crossing.__getitem__) for c in choices]

    between = count(after.start)
    return any(between <= min(map(count, inside(layer)), default=between) for layer in (before, after))


def carried(sequence: OperationSequence, cut: int, copy: range, layers: list[range]) -> int:
    """Bytes of the values that cross a cut between layers inside of a copy and are read in the rest of the copy, without skips.

    A skip is read behind the cut by one of the layers alone, and not handed from neighbour to neighbour. `layers` are sorted.
    """
    starts = [layer.start for layer in layers]

    def layer_at(position: int) -> int | None:
        index = bisect.bisect_right(starts, position) - 1
        return index if index >= 0 and position in layers[index] else None

    before, after = layer_at(cut - 1), layer_at(cut)
    total = 0
    for made, node in enumerate(sequence.nodes[:cut]):
        if node not in sequence.captured.specs or size_expression(node) is not None:
            continue
        readers = {layer_at(p) for p in (sequence.position.get(u, len(sequence)) for u in node.users) if cut <= p < copy.stop}
        from_neighbour = readers == {after} and layer_at(made) == before
        is_skip = len(readers) == 1 and None not in readers and not from_neighbour
        if readers and not is_skip:
            total += sequence.captured.specs[node].bytes(sequence.captured.hints)
    return total


def may_be_cut(sequence: OperationSequence, cuts: list[int]) -> bool:
    """Whether cuts leave no range empty and lie nowhere that a cut is forbidden."""
    return all(a < b for a, b in itertools.pairwise(cuts)) and all(math.isfinite(sequence.crossing[c]) for c in cuts)
