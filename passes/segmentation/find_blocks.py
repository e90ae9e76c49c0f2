"""Find the repeated layers of a graph.

The sequence of parameter uses, labelled by operation and parameter shape, repeats once per layer:

    embed | norm q k v o norm up down | norm q k v o norm up down | norm head

`FindBlocks` looks at the repeats that cover most of the sequence (`repeats`), keeps those whose copies feed one another
(`chains`), takes the one with the narrowest boundaries, and goes on to the left, to the right and inside of one copy.
Labels only nominate where layers may be; whether two layers are instances of one block is decided by `CutSegments`, which
compares them operation by operation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from ..compilation import Compilation, Fact
from .chains import carried, chains, feeds, handed_on, may_be_cut, narrow_between, parts, up_to_the_next, uses_in
from .names import Path, containers, has_alike_items, has_names, inside_an_item, item_cuts, items, stacks
from .operation_sequence import OperationSequence
from .repeats import Copies, place, ranges_between, repeats, rotate

_TRIES = 12  # repeats to look at before a stretch counts as one without layers
_JOINTS = 3  # boundaries between copies to look at: neighbours that read different masks make one of them wider than the others
_AS_LARGE = 0.75  # of the largest cover: repeats that cover as much compete by how narrow their boundaries are

Group = list[range]  # layers of one chain, in order


@dataclass(frozen=True)
class FindBlocks:
    """Provides `layers`: ranges of the line that are one layer each, and cuts that module names ask for."""

    name: ClassVar = "find_blocks"
    requires: ClassVar = frozenset({Fact.SEQUENCE})
    provides: ClassVar = frozenset({Fact.LAYERS})

    def apply(self, compilation: Compilation) -> None:
        sequence = compilation.sequence
        found = _search(sequence, 0, len(sequence), 0, len(sequence.uses))
        groups = [inner for group in found for inner in _refine(sequence, group)]
        lists = {path: passes for path, passes in stacks(sequence).items() if all(_is_chain(sequence, spans) for spans in passes)}
        groups = _aligned(sequence, groups, lists)
        named = [containers(sequence, group) if len(group) > 1 else set() for group in groups]
        atomic = [any(inside_an_item(sequence, group, other) for other in named) for group in groups]
        kept = [(g, c) for g, c, inside in zip(groups, named, atomic, strict=True) if not inside]
        compilation.forced_cuts = item_cuts(sequence, set(lists).union(*(c for _, c in kept)), range(len(sequence)))
        compilation.layers = [r for group, c in kept for layer in group for r in _split(sequence, layer, group, c)]


def _aligned(sequence: OperationSequence, groups: list[Group], lists: dict[Path, list[list[range]]]) -> list[Group]:
    """The groups, with items of a list in the place of copies that hold parameters of several items of it."""
    innermost = [path for path in lists if not any(other != path and other[: len(path)] == path for other in lists)]
    crossed = {path for path in innermost for group in groups for copy in group if len(_items_used(sequence, copy, path)) > 1}
    aligned = [_between_items(sequence, spans) for spans in _together([spans for path in crossed for spans in lists[path]])]
    aligned = [group for group in aligned if group]
    taken = [range(group[0].start, group[-1].stop) for group in aligned]
    apart = [[c for c in group if all(c.stop <= t.start or c.start >= t.stop for t in taken)] for group in groups]
    return [*aligned, *filter(None, apart)]


def _together(passes: list[list[range]]) -> list[list[range]]:
    """Passes over lists, those that take turns as one."""
    joined: list[list[range]] = []
    end = 0
    for spans in sorted(passes, key=lambda spans: spans[0].start):
        if joined and spans[0].start < end:
            joined[-1] = sorted([*joined[-1], *spans], key=lambda span: span.start)
        else:
            joined.append(spans)
        end = max(end, spans[-1].stop)
    return joined


def _between_items(sequence: OperationSequence, spans: list[range]) -> Group:
    cuts = sorted({*(span.start for span in spans), max(span.stop for span in spans)})
    return ranges_between([cut for cut in cuts if math.isfinite(sequence.crossing[cut])])


def _items_used(sequence: OperationSequence, span: range, path: Path) -> set[Path]:
    """The items of a container whose parameters a range uses."""
    return {item for use in uses_in(sequence, span) for item in items(sequence.paths[use.position]) if item[:-1] == path}


def _is_chain(sequence: OperationSequence, spans: list[range]) -> bool:
    """Whether most of these ranges are fed by one before them, whichever way."""
    return 2 * len(feeds(sequence, up_to_the_next(spans))) >= len(spans)


@dataclass(frozen=True)
class _Layers:
    """A repeat whose copies are layers.

    chains     the copies that feed one another, by index
    handed_on  by the cut between two copies, how many values cross it and are read within `reach` operations behind it; the
               first of several cuts may be crossed by more than the others, and is left out
    """

    copies: Copies
    chains: list[list[int]]
    handed_on: dict[int, int]
    reach: int

    @property
    def width(self) -> int:
        return max(self.handed_on.values())

    def no_wider_than(self, copies: Copies) -> bool:
        """Whether these copies are surely no narrower: at some of the same cuts, they hand on as much or more, since they are as long or longer."""
        return (
            all(self.handed_on.get(cut, 0) >= self.width for cut in copies.cuts[1:-1])
            and min(map(len, copies.ranges)) >= self.reach
        )


def _search(sequence: OperationSequence, start: int, end: int, first: int, last: int) -> list[Group]:
    """Groups of layers within operations [start, end) that hold the uses [first, last)."""
    candidates = repeats(sequence.uses[first:last])[:_TRIES]
    while candidates:
        least = _AS_LARGE * candidates[0].cover
        found: list[_Layers] = []
        for candidate in candidates:
            if candidate.cover < least:
                break
            copies = rotate(sequence, candidate, start, end, first)
            if any(larger.no_wider_than(copies) for larger in found):
                continue
            layers = _as_layers(sequence, copies)
            if layers is not None:
                found.append(layers)
        if found:  # the narrowest boundaries; of these, the largest cover; of these, the shortest period
            best = min(found, key=lambda f: (f.width, -len(f.copies.ranges) * f.copies.period, f.copies.period))
            groups = _place_chains(sequence, best, start, end)
            cuts, bounds = best.copies.cuts, best.copies.bounds
            left = _search(sequence, start, cuts[0], first, bounds[0])
            return [*left, *groups, *_search(sequence, cuts[-1], end, bounds[-1], last)]
        candidates = [r for r in candidates if r.cover < least]
    return []


def _as_layers(sequence: OperationSequence, copies: Copies) -> _Layers | None:
    """The copies of a repeat as layers; None if they are none. Labels only nominated them."""
    ranges = copies.ranges
    if not may_be_cut(sequence, copies.cuts):
        return None
    found = chains(sequence, ranges)
    chained = [chain for chain in found if len(chain) > 1]
    if 2 * sum(map(len, chained)) <= len(ranges):
        return None
    joints = [(ranges[a], ranges[b]) for chain in chained for a, b in itertools.pairwise(chain)]
    if (
        not any(narrow_between(sequence, *joint) for joint in joints[:_JOINTS])
        or len({len(parts(sequence, r)) for r in ranges}) > 1
    ):
        return None
    counted = joints[1:] or joints
    cuts = [after.start for _, after in counted]
    reach = min(len(after) for _, after in counted)
    count = handed_on(sequence, reach, range(min(cuts), max(cuts) + 1))
    return _Layers(copies, found, {cut: count(cut) for cut in cuts}, reach)


def _place_chains(sequence: OperationSequence, layers: _Layers, start: int, end: int) -> list[Group]:
    """The layers of each chain. A chain whose copies stand side by side gets ends of its own: what lies between towers is in none."""
    bounds, ranges = layers.copies.bounds, layers.copies.ranges
    groups, low = [], start
    for chain in layers.chains:
        first, last = chain[0], chain[-1]
        together = len(chain) > 1 and last - first + 1 == len(chain)
        alone = all(max(first, other[0]) > min(last, other[-1]) for other in layers.chains if other is not chain)
        if together and alone:
            high = ranges[last + 1].start if last + 1 < len(ranges) else end
            placed = place(sequence, bounds[first : last + 2], low, high)
            groups.append(ranges_between(placed))
            low = placed[-1]
        else:
            groups.append([ranges[i] for i in chain])
            low = max(low, ranges[last].stop)
    return groups


def _refine(sequence: OperationSequence, group: Group) -> list[Group]:
    """The layers inside of copies that are stages: groups of items of one container, as narrow between as the copies are."""
    if not has_names(sequence, group[0]):  # `_split` takes these apart
        return [group]
    width = min((sequence.crossing[r.start] for r in group[1:]), default=0) * 1.01
    inner = []
    for copy in group:
        within = _inside(sequence, copy)
        layers = sorted((layer for found in within for layer in found), key=lambda layer: layer.start)
        found_items = [
            found for found in within if _are_items(sequence, found) and _is_narrow(sequence, found, copy, layers, width)
        ]
        inner += found_items if _make_up(sequence, found_items, copy) else []
    if not inner:
        return [group]
    return [finer for found in inner for finer in _refine(sequence, found)]


def _make_up(sequence: OperationSequence, groups: list[Group], copy: range) -> bool:
    """Whether these layers have most of a copy's uses of parameters: otherwise it is no stage, but a layer with a list in it."""
    return 2 * sum(len(uses_in(sequence, layer)) for group in groups for layer in group) >= len(uses_in(sequence, copy))


def _inside(sequence: OperationSequence, copy: range) -> list[Group]:
    uses = uses_in(sequence, copy)
    if not uses:
        return []
    first = sequence.uses.index(uses[0])
    return _search(sequence, copy.start, copy.stop, first, first + len(uses))


def _are_items(sequence: OperationSequence, group: Group) -> bool:
    """Whether ranges are layers of a container, or in none."""
    of = containers(sequence, group)
    return len(group) > 1 and (
        any(has_alike_items(sequence, group, path) for path in of) or not of and not _in_items(sequence, group)
    )


def _is_narrow(sequence: OperationSequence, group: Group, copy: range, layers: Group, width: float) -> bool:
    """Whether at most `width` bytes, without skips, are handed on between layers inside of a copy that holds these layers."""
    cuts = [layer.start for layer in group[1:]]
    return all(sequence.crossing[cut] <= width or carried(sequence, cut, copy, layers) <= width for cut in cuts)


def _in_items(sequence: OperationSequence, group: Group) -> bool:
    """Whether any operation of these ranges lies in an item of a container."""
    return any(items(sequence.paths[position]) for layer in group for position in layer)


def _split(sequence: OperationSequence, layer: range, group: Group, of: set[Path]) -> list[range]:
    """Cut a copy that holds several layers: where its parts do not hang together, and at cuts as narrow as its own boundary.

    With module names, these are at items of the containers that the group is made of; without, at repeats within the copy.
    """
    apart = parts(sequence, layer)
    if len(apart) > 1:
        return apart
    width = min((sequence.crossing[r.start] for r in group[1:]), default=0) * 1.01
    if has_names(sequence, layer):
        cuts = item_cuts(sequence, of, layer)
    else:
        cuts = {c for inner in _inside(sequence, layer) for r in inner for c in (r.start, r.stop)}
    inside = ranges_between(sorted({layer.start, *(c for c in cuts if layer.start < c < layer.stop), layer.stop}))
    narrow = [r.start for r in inside[1:] if _is_narrow(sequence, [layer, r], layer, inside, width)]
    return ranges_between([layer.start, *narrow, layer.stop])
