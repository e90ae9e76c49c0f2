"""Repeats in the sequence of parameter uses, and where to cut between their copies.

A *tandem repeat* of a sequence is a stretch that consists of copies of one period, one after the other. Labels (operation and
shape of the parameter) only nominate: `chains` looks at what the copies compute.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import torch

from .names import item_depth
from .operation_sequence import OperationSequence, ParameterUse


@dataclass(frozen=True)
class Repeat:
    """`copies` copies of `period` uses, from use `offset` on; it can be rotated by up to `slack` uses without losing a copy."""

    offset: int
    period: int
    copies: int
    slack: int

    @property
    def cover(self) -> int:
        """Number of uses in it."""
        return self.period * self.copies


@dataclass(frozen=True)
class Copies:
    """A repeat with its places on the line. `bounds` are the indices of the uses that copies begin with, `cuts` positions."""

    period: int
    bounds: list[int]
    cuts: list[int]

    @property
    def ranges(self) -> list[range]:
        return ranges_between(self.cuts)


def ranges_between(cuts: list[int]) -> list[range]:
    """The ranges between neighbours of sorted cuts."""
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def repeats(uses: list[ParameterUse]) -> list[Repeat]:
    """The longest tandem repeat of each period, the largest cover first, short periods before long ones."""
    labels = torch.tensor([u.label for u in uses])
    found = []
    for period in range(1, len(uses) // 2 + 1):
        differ = (labels[period:] != labels[:-period]).nonzero().flatten()
        edges = torch.cat([torch.tensor([-1]), differ, torch.tensor([len(uses) - period])])
        runs = edges.diff() - 1
        longest = int(runs.max())
        copies = longest // period + 1
        if copies >= 2:
            offset = int(edges[int(runs.argmax())]) + 1
            found.append(Repeat(offset, period, copies, longest + period - copies * period))
    return sorted(found, key=lambda r: (-r.cover, r.period))


def rotate(sequence: OperationSequence, repeat: Repeat, start: int, end: int, first: int) -> Copies:
    """The rotation with the cheapest cuts between copies; of those, where names say that layers begin.

    `first` is the index of the use that `repeat.offset` counts from.
    """
    best = None
    for rotation in range(repeat.slack + 1):
        bounds = [first + repeat.offset + rotation + i * repeat.period for i in range(repeat.copies + 1)]
        cuts = place(sequence, bounds, start, end)
        between = sum(sequence.crossing[c] for c in cuts[1:-1])
        named = sum(item_depth(sequence, c) for c in cuts[1:-1])
        cost = (between, named, _outer_cost(sequence, cuts))
        if best is None or cost < best[0]:
            best = (cost, Copies(repeat.period, bounds, cuts))
    return best[1]


def _outer_cost(sequence: OperationSequence, cuts: list[int]) -> float:
    return sum(sequence.crossing[c] for c in (cuts[0], cuts[-1]) if 0 < c < len(sequence))


def place(sequence: OperationSequence, bounds: list[int], start: int, end: int) -> list[int]:
    """Cut positions in [start, end] for the boundaries before the uses `bounds`; copies of equal length are cut at equal offsets."""
    gaps = [_gap(sequence, b, start, end) for b in bounds]
    inner = gaps[1:-1]
    reach = min(high - low for low, high in inner)
    back = min(range(reach + 1), key=lambda d: (sum(sequence.crossing[high - d] for _, high in inner), d))
    cuts = [high - back for _, high in inner]
    before = sequence.operations_before
    lengths = {before[b] - before[a] for a, b in itertools.pairwise(cuts)}
    width = max(sequence.crossing[c] for c in cuts)
    if len(lengths) != 1:
        return [_outer(sequence, gaps[0], gaps[0][1] - back, width), *cuts, _outer(sequence, gaps[-1], None, width)]
    length = lengths.pop()
    left = bisect.bisect_right(before, before[cuts[0]] - length) - 1
    right = bisect.bisect_left(before, before[cuts[-1]] + length)
    return [_outer(sequence, gaps[0], left, width), *cuts, _outer(sequence, gaps[-1], right, width)]


def _gap(sequence: OperationSequence, bound: int, start: int, end: int) -> tuple[int, int]:
    """Positions of the cuts that separate use `bound - 1` from use `bound`, within [start, end]."""
    low = max(start, sequence.uses[bound - 1].position + 1 if bound > 0 else start)
    high = min(end, sequence.uses[bound].position if bound < len(sequence.uses) else end)
    return low, max(low, high)


def _outer(sequence: OperationSequence, gap: tuple[int, int], wanted: int | None, width: float) -> int:
    """The cut at an end of a group: where the copies' length puts it if that is as narrow as between two copies."""
    low, high = gap
    if wanted is not None and low <= wanted <= high and sequence.crossing[wanted] <= width:
        return wanted
    return min(range(low, high + 1), key=lambda c: (sequence.crossing[c], item_depth(sequence, c), -c))
