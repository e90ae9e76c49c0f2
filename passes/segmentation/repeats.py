"""Repeats in the sequence of parameter uses, and where to cut between their copies.

A *tandem repeat* of a sequence is a stretch that consists of copies of one period, one after the other. Labels (operation and
shape of the parameter) only suggest candidates: `chains` looks at the data flow between the copies.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import torch

from l2l_compile.passes.operation_sequence import OperationSequence, ParameterUse
from l2l_compile.passes.segmentation.names import item_depth


@dataclass(frozen=True)
class Repeat:
    """`copies` copies of `period` uses, from use `offset` on. A start up to `slack` uses later (a rotation) loses no copy."""

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
    """A repeat with its cuts.

    bounds  the index of the first use of each copy, and the index of the use after the last copy
    cuts    the position where each copy begins, and the position where the last copy ends
    """

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
    of_each_period = (_longest_repeat(labels, period) for period in range(1, len(uses) // 2 + 1))
    return sorted((r for r in of_each_period if r.copies >= 2), key=lambda r: (-r.cover, r.period))


def _longest_repeat(labels: torch.Tensor, period: int) -> Repeat:
    """The longest stretch in which every label equals the label `period` uses later; one copy if there is no such label."""
    differ = (labels[period:] != labels[:-period]).nonzero().flatten()
    edges = torch.cat([torch.tensor([-1]), differ, torch.tensor([len(labels) - period])])
    runs = edges.diff() - 1
    longest = int(runs.max())
    copies = longest // period + 1
    offset = int(edges[int(runs.argmax())]) + 1
    return Repeat(offset, period, copies, slack=longest + period - copies * period)


@dataclass(frozen=True, order=True)
class RotationCost:
    """The cost of a rotation, compared field by field.

    between_bytes  bytes that cross the cuts between copies
    item_depth     sum over these cuts of `names.item_depth`, since layers are items of containers
    outer_bytes    bytes that cross the cuts at both ends
    """

    between_bytes: float
    item_depth: int
    outer_bytes: float

    @classmethod
    def of(cls, sequence: OperationSequence, cuts: list[int]) -> RotationCost:
        between, ends = cuts[1:-1], (cuts[0], cuts[-1])
        return cls(
            sum(sequence.crossing[cut] for cut in between),
            sum(item_depth(sequence, cut) for cut in between),
            sum(sequence.crossing[cut] for cut in ends if 0 < cut < len(sequence)),
        )


def best_rotation(sequence: OperationSequence, repeat: Repeat, start: int, end: int, first: int) -> Copies:
    """The rotation with the cheapest cuts between copies. Of equal rotations, `RotationCost` prefers cuts at container items.

    `first` is the index of the use that `repeat.offset` counts from.
    """
    rotations = []
    for rotation in range(repeat.slack + 1):
        bounds = [first + repeat.offset + rotation + i * repeat.period for i in range(repeat.copies + 1)]
        rotations.append(Copies(repeat.period, bounds, choose_cuts(sequence, bounds, start, end)))
    return min(rotations, key=lambda copies: RotationCost.of(sequence, copies.cuts))


@dataclass(frozen=True)
class _Gap:
    """The cuts from `low` to `high`, both included, that separate two neighbouring uses of parameters."""

    low: int
    high: int

    @classmethod
    def before(cls, sequence: OperationSequence, bound: int, start: int, end: int) -> _Gap:
        """The gap between use `bound - 1` and use `bound`, within [start, end]."""
        low = max(start, sequence.uses[bound - 1].position + 1 if bound > 0 else start)
        high = min(end, sequence.uses[bound].position if bound < len(sequence.uses) else end)
        return cls(low, max(low, high))

    def cheapest(self, sequence: OperationSequence) -> int:
        cuts = range(self.low, self.high + 1)
        return min(cuts, key=lambda cut: (sequence.crossing[cut], item_depth(sequence, cut), -cut))


def choose_cuts(sequence: OperationSequence, bounds: list[int], start: int, end: int) -> list[int]:
    """Cuts in [start, end], one before each use in `bounds`.

    The inner cuts have one common offset from these uses. If this gives copies of equal length, the outer copies get that
    length too, where possible.
    """
    left, *between, right = [_Gap.before(sequence, bound, start, end) for bound in bounds]
    offset = _common_offset(sequence, between)
    cuts = [gap.high - offset for gap in between]
    length = _common_length(sequence, cuts)
    before = sequence.operations_before
    if length is None:
        wanted_left, wanted_right = left.high - offset, None
    else:
        wanted_left = bisect.bisect_right(before, before[cuts[0]] - length) - 1
        wanted_right = bisect.bisect_left(before, before[cuts[-1]] + length)
    width = max(sequence.crossing[cut] for cut in cuts)
    return [_outer_cut(sequence, left, wanted_left, width), *cuts, _outer_cut(sequence, right, wanted_right, width)]


def _common_offset(sequence: OperationSequence, gaps: list[_Gap]) -> int:
    """The number of operations from the cut to the next use, equal in all gaps, at which the fewest bytes cross in total."""
    shortest = min(gap.high - gap.low for gap in gaps)
    return min(range(shortest + 1), key=lambda offset: (sum(sequence.crossing[gap.high - offset] for gap in gaps), offset))


def _common_length(sequence: OperationSequence, cuts: list[int]) -> int | None:
    """The number of operations between neighbouring cuts; None if the numbers differ, or if there is a single cut."""
    before = sequence.operations_before
    lengths = {before[b] - before[a] for a, b in itertools.pairwise(cuts)}
    return lengths.pop() if len(lengths) == 1 else None


def _outer_cut(sequence: OperationSequence, gap: _Gap, wanted: int | None, width: float) -> int:
    """The cut at an end of a group: `wanted` if it is in the gap and at most `width` bytes cross it, otherwise the cheapest."""
    if wanted is not None and gap.low <= wanted <= gap.high and sequence.crossing[wanted] <= width:
        return wanted
    return gap.cheapest(sequence)
