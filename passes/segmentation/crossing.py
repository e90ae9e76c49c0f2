"""The values that cross a cut: their number, their bytes, and whether fewer cross between two layers than inside of them."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from torch import fx

from l2l_compile.passes.operation_sequence import OperationSequence, makes_number
from l2l_compile.passes.segmentation.chains import uses_in


@dataclass(frozen=True)
class CrossingCounts:
    """For each cut in `cuts`, the number of values that cross it and are read within `reach` operations after it.

    Values that a model collects from every layer and reads at its end do not count.
    """

    cuts: range
    counts: list[int]

    @classmethod
    def of(cls, sequence: OperationSequence, reach: int, cuts: range) -> CrossingCounts:
        change = [0] * (len(cuts) + 1)
        for node, readers in _readers(sequence, cuts.start, cuts.stop - 1 + reach).items():
            if node in sequence.position and node in sequence.captured.specs:
                for crossed in _crossed(sequence.position[node], readers, reach, cuts):
                    change[crossed.start - cuts.start] += 1
                    change[crossed.stop - cuts.start] -= 1
        return cls(cuts, list(itertools.accumulate(change)))

    def at(self, cut: int) -> int:
        return self.counts[cut - self.cuts.start]


def _readers(sequence: OperationSequence, start: int, end: int) -> dict[fx.Node, list[int]]:
    """The values read from `start` to `end`, with the positions of their readers. Outputs are read after the last operation."""
    found: dict[fx.Node, list[int]] = {}
    for position in range(start, min(end, len(sequence))):
        for read in sequence.reads[position]:
            found.setdefault(read, []).append(position)
    if end > len(sequence):
        for output in filter(sequence.position.__contains__, sequence.captured.outputs):
            found.setdefault(output, []).append(len(sequence))
    return found


def _crossed(made: int, readers: list[int], reach: int, cuts: range) -> list[range]:
    """The ranges of cuts that a value crosses and after which it is read within `reach` operations. `readers` are sorted."""
    found = []
    least = max(cuts.start, made + 1)
    for reader in readers:
        first, last = max(least, reader - reach + 1), min(reader, cuts.stop - 1)
        if first <= last:
            found.append(range(first, last + 1))
            least = last + 1
    return found


def is_bottleneck(sequence: OperationSequence, before: range, after: range) -> bool:
    """Whether at most as many values cross the cut between two neighbours as each cut inside of one of them.

    For two of four projections of one input, this is false: at the cut before the other two projections, more values are
    alive than at the cut between the first two. One of the ranges is enough: the last layer may be the last reader of a mask.
    """
    counts = CrossingCounts.of(sequence, len(after), range(before.start, after.stop + 1))
    between = counts.at(after.start)
    return any(
        between <= min((counts.at(cut) for cut in _cuts_between_uses(sequence, layer)), default=between)
        for layer in (before, after)
    )


def _cuts_between_uses(sequence: OperationSequence, layer: range) -> list[int]:
    """The cheapest cut between each pair of successive parameter uses."""
    positions = [use.position for use in uses_in(sequence, layer)]
    choices = [range(a + 1, b + 1) for a, b in itertools.pairwise(positions) if a < b]
    return [min(between, key=sequence.crossing.__getitem__) for between in choices]


def bytes_without_skips(sequence: OperationSequence, cut: int, copy: range, layers: list[range]) -> int:
    """Bytes of the values that cross a cut between layers inside of a copy, and that the rest of the copy reads, without skips.

    A skip is a value that exactly one layer reads after the cut. A value that the layer before the cut makes for the layer
    after it is no skip. `layers` are sorted.
    """
    before, after = _layer_at(cut - 1, layers), _layer_at(cut, layers)
    total = 0
    for position, node in enumerate(sequence.nodes[:cut]):
        if node not in sequence.captured.specs or makes_number(node):
            continue
        readers = _reading_layers(sequence, node, range(cut, copy.stop), layers)
        to_neighbour = readers == {after} and _layer_at(position, layers) == before
        is_skip = len(readers) == 1 and None not in readers and not to_neighbour
        if readers and not is_skip:
            total += sequence.captured.specs[node].bytes(sequence.captured.hints)
    return total


def _reading_layers(sequence: OperationSequence, node: fx.Node, span: range, layers: list[range]) -> set[int | None]:
    """The layers that read a value within a range; None stands for a reader outside of all layers."""
    read_at = [sequence.position.get(user, len(sequence)) for user in node.users]
    return {_layer_at(position, layers) for position in read_at if position in span}


def _layer_at(position: int, layers: list[range]) -> int | None:
    """The index of the layer that an operation lies in; None if it lies in none. `layers` are sorted."""
    index = bisect.bisect_right(layers, position, key=lambda layer: layer.start) - 1
    return index if index >= 0 and position in layers[index] else None


def may_be_cut(sequence: OperationSequence, cuts: list[int]) -> bool:
    """Whether the cuts leave no range empty, and none of them is forbidden."""
    in_order = all(a < b for a, b in itertools.pairwise(cuts))
    return in_order and all(math.isfinite(sequence.crossing[cut]) for cut in cuts)
