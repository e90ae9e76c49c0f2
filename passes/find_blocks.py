"""Find the repeated layers of a graph.

The sequence of parameter uses, labelled by operation and parameter shape, repeats once per layer:

    embed | norm q k v o norm up down | norm q k v o norm up down | norm head

`FindBlocks` takes the repeat that covers most of the sequence, rotates it so that its boundaries are the cheapest
cuts, and goes on to the left, to the right and inside of one copy. Labels only nominate where layers may be; whether
two layers are instances of one block is decided by `CutSegments`, which compares them operation by operation.

Module names, where the graph has them, serve as hints for what labels cannot tell: a first layer that differs from
the others, and two kinds of layer that alternate. They never decide that two layers are equal.
"""
from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .compilation import Compilation
from .line import Line, Use

Path = tuple[str, ...]
_TRIES = 8  # repeats to look at before a stretch counts as one without layers


@dataclass(frozen=True)
class FindBlocks:
    """Provides `layers`: ranges of the line that are one layer each, and cuts that module names ask for."""

    name: str = "find_blocks"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"layers"})

    def apply(self, compilation: Compilation) -> None:
        line = compilation.line
        groups = _search(line, 0, len(line), 0, len(line.uses))
        containers = [_containers(line, group) for group in groups]
        atomic = [any(_inside_an_item(line, group, other) for other in containers) for group in groups]
        kept = [(g, c) for g, c, inside in zip(groups, containers, atomic, strict=True) if not inside]
        compilation.forced_cuts = _item_cuts(line, set().union(*(c for _, c in kept)), range(len(line)))
        compilation.layers = [r for group, c in kept for layer in group for r in _split(line, layer, group, c)]


def _search(line: Line, start: int, end: int, first: int, last: int) -> list[list[range]]:
    """Groups of repeated ranges within operations [start, end) that hold the uses [first, last)."""
    for _, repeats in itertools.groupby(_repeats(line.uses[first:last])[:_TRIES], key=lambda r: r[1] * r[2]):
        found = [(bounds, cuts) for r in repeats for bounds, cuts in [_rotate(line, r, start, end, first)] if _are_layers(line, cuts)]
        if found:  # of repeats that cover as much, the one that hands on the fewest values; of those, the shortest
            bounds, cuts = min(found, key=lambda f: _handed_on(line, _ranges(f[1]))(f[1][1]))
            left = _search(line, start, cuts[0], first, bounds[0])
            return [*left, _ranges(cuts), *_search(line, cuts[-1], end, bounds[-1], last)]
    return []


def _ranges(cuts: list[int]) -> list[range]:
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _are_layers(line: Line, cuts: list[int]) -> bool:
    """Whether the ranges between these cuts can be layers; labels only nominated them."""
    group = _ranges(cuts)
    allowed = all(map(len, group)) and all(math.isfinite(line.crossing[c]) for c in cuts)
    return allowed and _is_chain(line, group) and _is_narrow_between(line, group)


def _is_chain(line: Line, group: list[range]) -> bool:
    """Whether every range reads a value that the one before it made. Three projections of one input do not."""
    for before, after in zip(group, group[1:], strict=False):
        made = (line.nodes[i] for i in before)
        if not any(line.position.get(user, -1) in after for node in made for user in node.users):
            return False
    return True


def _handed_on(line: Line, group: list[range]) -> Callable[[int], int]:
    """How many values cross a cut in the first two ranges of a group and are read within one range's length."""
    length, end = len(group[1]), group[1].stop
    change = [0] * (end + 2)
    for start, node in enumerate(line.nodes[:end]):
        if node not in line.captured.specs:
            continue
        counted = start + 1  # cuts before this one are counted for this value, or lie before it
        for reader in sorted(line.position.get(u, len(line)) for u in node.users):
            first, last = max(counted, reader - length + 1), min(reader, end)
            if first <= last:  # the reader is within reach of the cuts from first to last
                change[first] += 1
                change[last + 1] -= 1
                counted = last + 1
    return list(itertools.accumulate(change)).__getitem__


def _is_narrow_between(line: Line, group: list[range]) -> bool:
    """Whether no fewer values are handed on inside of one of the first two ranges than between them.

    Two of four projections of one input are no layer: the other two follow where more values are alive than between
    the projections themselves. Only values that are read within one range's length count: what a model collects
    from every layer for its end does not. One range is enough, since the last one may be the last to read a mask.
    """
    handed_on = _handed_on(line, group)

    def inside(layer: range) -> list[int]:
        first = bisect.bisect_left(line.uses, layer.start, key=lambda u: u.position)
        last = bisect.bisect_left(line.uses, layer.stop, key=lambda u: u.position)
        gaps = zip(line.uses[first : last - 1], line.uses[first + 1 : last], strict=True)
        choices = (range(a.position + 1, b.position + 1) for a, b in gaps if a.position < b.position)
        return [min(c, key=line.crossing.__getitem__) for c in choices]

    between = handed_on(group[1].start)
    return any(between <= min(map(handed_on, inside(layer)), default=between) for layer in group[:2])


def _rotate(line: Line, repeat: tuple[int, int, int, int], start: int, end: int, first: int) -> tuple[list, list]:
    """The rotation of a repeat with the cheapest boundaries: (indices of their uses, cut positions)."""
    offset, period, copies, slack = repeat
    best = None
    for rotation in range(slack + 1):
        bounds = [first + offset + rotation + i * period for i in range(copies + 1)]
        cuts = _place(line, bounds, start, end)
        cost = sum(line.crossing[c] for c in cuts[1:-1]) + _outer_cost(line, cuts)
        named = sum(_item_depth(line, c) for c in cuts)
        if best is None or (cost, named) < best[0]:
            best = ((cost, named), bounds, cuts)
    return best[1], best[2]


def _outer_cost(line: Line, cuts: list[int]) -> float:
    return sum(line.crossing[c] for c in (cuts[0], cuts[-1]) if 0 < c < len(line))


def _repeats(uses: list[Use]) -> list[tuple[int, int, int, int]]:
    """(offset, period, copies, slack) of tandem repeats, the largest cover first, short periods before long ones.

    `slack` is how far the repeat can be rotated without losing a copy.
    """
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
            found.append((offset, period, copies, longest + period - copies * period))
    return sorted(found, key=lambda r: (-r[1] * r[2], r[1]))


def _place(line: Line, bounds: list[int], start: int, end: int) -> list[int]:
    """Cut positions for the boundaries before the uses `bounds`; copies of equal length are cut at equal offsets."""
    gaps = [_gap(line, b, start, end) for b in bounds]
    inner = gaps[1:-1]
    reach = min(high - low for low, high in inner)
    back = min(range(reach + 1), key=lambda d: (sum(line.crossing[high - d] for _, high in inner), d))
    cuts = [high - back for _, high in inner]
    before = line.operations_before
    lengths = {before[b] - before[a] for a, b in zip(cuts, cuts[1:], strict=False)}
    width = max(line.crossing[c] for c in cuts)
    if len(lengths) != 1:
        return [_outer(line, gaps[0], gaps[0][1] - back, width), *cuts, _outer(line, gaps[-1], None, width)]
    length = lengths.pop()
    left = bisect.bisect_right(before, before[cuts[0]] - length) - 1
    right = bisect.bisect_left(before, before[cuts[-1]] + length)
    return [_outer(line, gaps[0], left, width), *cuts, _outer(line, gaps[-1], right, width)]


def _gap(line: Line, bound: int, start: int, end: int) -> tuple[int, int]:
    """Positions of the cuts that separate use `bound - 1` from use `bound`, within [start, end]."""
    low = max(start, line.uses[bound - 1].position + 1 if bound > 0 else start)
    high = min(end, line.uses[bound].position if bound < len(line.uses) else end)
    return low, max(low, high)


def _outer(line: Line, gap: tuple[int, int], wanted: int | None, width: float) -> int:
    """The cut at an end of a group: where the copies' length puts it if that is as narrow as between two copies."""
    low, high = gap
    if wanted is not None and low <= wanted <= high and line.crossing[wanted] <= width:
        return wanted
    return min(range(low, high + 1), key=lambda c: (line.crossing[c], _item_depth(line, c), -c))


def _item_depth(line: Line, cut: int) -> int:
    """How deep the outermost container item lies that begins or ends at a cut, as far as names tell; 99 for none."""
    if not 0 < cut < len(line):
        return 0
    before, after = set(_items(line.paths[cut - 1])), set(_items(line.paths[cut]))
    return min((len(item) for item in before ^ after), default=99)


@functools.cache
def _items(path: Path) -> list[Path]:
    """Prefixes of a module path that end in an index: the items of containers that it lies in."""
    return [path[: i + 1] for i, part in enumerate(path) if part.isdigit()]


def _containers(line: Line, group: list[range]) -> set[Path]:
    """Module containers whose items the ranges of a group are made of: each range has items of its own."""
    seen: dict[Path, list[set[str]]] = {}
    for index, layer in enumerate(group):
        for position in layer:
            for item in _items(line.paths[position]):
                seen.setdefault(item[:-1], [set() for _ in group])[index].add(item[-1])
    return {
        container
        for container, sets in seen.items()
        if all(sets) and sum(map(len, sets)) == len(set().union(*sets))
    }


def _inside_an_item(line: Line, group: list[range], containers: set[Path]) -> bool:
    """Whether a group lies within a single item of these containers: a layer is not cut where its siblings are not."""
    found = {
        next((i for i in _items(line.paths[p]) if i[:-1] in containers), None)
        for layer in group for p in layer if line.paths[p]
    }
    return len(found) == 1 and None not in found


def _item_cuts(line: Line, containers: set[Path], span: range) -> set[int]:
    """Cuts where one item of these containers ends or another begins. Operations without a name go on as before."""
    cuts: set[int] = set()
    current: Path | None = None
    for position in span:
        path = line.paths[position]
        if not path:
            continue
        item = next((i for i in _items(path) if i[:-1] in containers), None)
        if item != current and position > span.start and math.isfinite(line.crossing[position]):
            cuts.add(position)
        current = item
    return cuts


def _split(line: Line, layer: range, group: list[range], containers: set[Path]) -> list[range]:
    """Cut a copy that holds several layers, at cuts as narrow as its own boundary.

    With module names: at items of the containers that the group is made of. Without: at repeats within the copy.
    """
    width = min((line.crossing[r.start] for r in group[1:]), default=0) * 1.01
    if any(line.paths[position] for position in layer):
        cuts = _item_cuts(line, containers, layer)
    else:
        first = bisect.bisect_left(line.uses, layer.start, key=lambda u: u.position)
        last = bisect.bisect_left(line.uses, layer.stop, key=lambda u: u.position)
        found = _search(line, layer.start, layer.stop, first, last)
        cuts = {c for inner in found for r in inner for c in (r.start, r.stop)}
    inside = sorted(c for c in cuts if layer.start < c < layer.stop and line.crossing[c] <= width)
    return _ranges([layer.start, *inside, layer.stop])
