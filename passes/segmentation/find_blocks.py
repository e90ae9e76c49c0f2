"""Find the repeated layers of a graph.

The sequence of parameter uses, labelled by operation and parameter shape, repeats once per layer:

    embed | norm q k v o norm up down | norm q k v o norm up down | norm head

`FindBlocks` looks at the repeats that cover most of the sequence (`repeats`), keeps the repeats whose copies are chains
(`chains`), and takes the repeat with the fewest values across its cuts (`crossing`). It then continues to the left, to the
right and inside of the copies. Labels only suggest layers. `CutSegments` decides whether two layers are instances of one block:
it compares them operation by operation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.operation_sequence import OperationSequence
from l2l_compile.passes.segmentation.chains import chains, components, extended_to_next, find_predecessors, uses_in
from l2l_compile.passes.segmentation.crossing import CrossingCounts, bytes_without_skips, is_bottleneck, may_be_cut
from l2l_compile.passes.segmentation.names import (
    Path,
    Traversal,
    containers,
    has_items_of_one_class,
    has_names,
    inside_an_item,
    item_cuts,
    items,
    list_traversals,
)
from l2l_compile.passes.segmentation.repeats import Copies, Repeat, best_rotation, choose_cuts, ranges_between, repeats

_TRIES = 12  # number of repeats that are tried before a stretch counts as a stretch without layers
_JOINTS = 3  # number of boundaries between copies that are tried: one may be wider, if its two copies read different masks
_AS_LARGE = 0.75  # share of the largest cover: among repeats that cover at least as much, the narrowest boundaries decide
_ROUNDING = 1.01  # up to this factor, a cut inside of a layer counts as equally narrow as the layer's boundary

Group = list[range]  # layers of one chain, in order


@dataclass(frozen=True)
class FindBlocks:
    """Provides `layers`: ranges of the sequence that are one layer each, and cuts that module names ask for."""

    name: ClassVar[str] = "find_blocks"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SEQUENCE})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LAYERS})

    def apply(self, compilation: Compilation) -> None:
        sequence = compilation.sequence
        whole = _Stretch(0, len(sequence), 0, len(sequence.uses))
        refined = [inner for group in _search(sequence, whole) for inner in _refine(sequence, group)]
        lists = _layer_lists(sequence)
        groups = _without_inner(sequence, _aligned(sequence, refined, lists))
        named = set(lists).union(*(group.containers for group in groups))
        compilation.forced_cuts = item_cuts(sequence, named, range(len(sequence)))
        compilation.layers = [part for group in groups for layer in group.layers for part in _split(sequence, layer, group)]


@dataclass(frozen=True)
class _Stretch:
    """The operations [start, end) and the uses of parameters in them, which have the indices [first_use, last_use)."""

    start: int
    end: int
    first_use: int
    last_use: int


# ---- search for repeats ----------------------------------------------------------------------------------------------


def _search(sequence: OperationSequence, stretch: _Stretch) -> list[Group]:
    """Groups of layers within a stretch, from left to right."""
    best = _best_repeat(sequence, stretch)
    if best is None:
        return []
    cuts, bounds = best.copies.cuts, best.copies.bounds
    left = _Stretch(stretch.start, cuts[0], stretch.first_use, bounds[0])
    right = _Stretch(cuts[-1], stretch.end, bounds[-1], stretch.last_use)
    return [*_search(sequence, left), *_cut_chains(sequence, best, stretch), *_search(sequence, right)]


@dataclass(frozen=True)
class _LayerRepeat:
    """A repeat whose copies are layers.

    chains    the copies that read one another, by index
    crossing  for each cut between two copies, the number of values that cross it and are read within `reach` operations after
              it; the first of several cuts is left out, since more values may cross it than the others
    """

    copies: Copies
    chains: list[list[int]]
    crossing: dict[int, int]
    reach: int

    @property
    def width(self) -> int:
        return max(self.crossing.values())

    def no_wider_than(self, copies: Copies) -> bool:
        """Whether the cuts of `copies` are certainly not narrower than the cuts of this repeat.

        This holds if at least `width` values cross each of them, and every copy has at least `reach` operations.
        """
        at_same_cuts = all(self.crossing.get(cut, 0) >= self.width for cut in copies.cuts[1:-1])
        return at_same_cuts and min(map(len, copies.ranges)) >= self.reach


def _best_repeat(sequence: OperationSequence, stretch: _Stretch) -> _LayerRepeat | None:
    """The repeat with the narrowest boundaries. Of equal repeats, the one with the largest cover, then the shortest period."""
    candidates = repeats(sequence.uses[stretch.first_use : stretch.last_use])[:_TRIES]
    while candidates:
        large = [repeat for repeat in candidates if repeat.cover >= _AS_LARGE * candidates[0].cover]
        found = _layer_repeats(sequence, large, stretch)
        if found:
            return min(found, key=lambda f: (f.width, -len(f.copies.ranges) * f.copies.period, f.copies.period))
        candidates = candidates[len(large) :]
    return None


def _layer_repeats(sequence: OperationSequence, candidates: list[Repeat], stretch: _Stretch) -> list[_LayerRepeat]:
    """The candidates whose copies are layers. A candidate that is certainly not narrower than an earlier one is skipped."""
    found: list[_LayerRepeat] = []
    for candidate in candidates:
        copies = best_rotation(sequence, candidate, stretch.start, stretch.end, stretch.first_use)
        if any(larger.no_wider_than(copies) for larger in found):
            continue
        layers = _as_layers(sequence, copies)
        if layers is not None:
            found.append(layers)
    return found


@dataclass(frozen=True)
class _Joint:
    """Two copies of which the second reads the first."""

    before: range
    after: range

    def is_narrow(self, sequence: OperationSequence) -> bool:
        return is_bottleneck(sequence, self.before, self.after)


def _as_layers(sequence: OperationSequence, copies: Copies) -> _LayerRepeat | None:
    """The copies of a repeat as layers. None if they are no layers: labels only suggest them."""
    ranges = copies.ranges
    if not may_be_cut(sequence, copies.cuts):
        return None
    found = chains(sequence, ranges)
    joints = [_Joint(ranges[a], ranges[b]) for chain in found for a, b in itertools.pairwise(chain)]
    if not _are_mostly_chained(found) or not any(joint.is_narrow(sequence) for joint in joints[:_JOINTS]):
        return None
    if len({len(components(sequence, copy)) for copy in ranges}) > 1:
        return None
    return _measured(sequence, copies, found, joints[1:] or joints)


def _are_mostly_chained(chains: list[list[int]]) -> bool:
    """Whether more than half of the copies are in chains of at least two copies."""
    chained = sum(len(chain) for chain in chains if len(chain) > 1)
    return 2 * chained > sum(map(len, chains))


def _measured(sequence: OperationSequence, copies: Copies, found: list[list[int]], joints: list[_Joint]) -> _LayerRepeat:
    """A repeat of layers, with the number of values that cross these joints."""
    cuts = [joint.after.start for joint in joints]
    reach = min(len(joint.after) for joint in joints)
    counts = CrossingCounts.of(sequence, reach, range(min(cuts), max(cuts) + 1))
    return _LayerRepeat(copies, found, {cut: counts.at(cut) for cut in cuts}, reach)


def _cut_chains(sequence: OperationSequence, layers: _LayerRepeat, stretch: _Stretch) -> list[Group]:
    """The layers of each chain, as one group per chain.

    If its copies are neighbours, a chain has ends of its own, so that operations between two towers are in neither tower.
    """
    bounds, ranges = layers.copies.bounds, layers.copies.ranges
    groups, low = [], stretch.start
    for chain in layers.chains:
        first, last = chain[0], chain[-1]
        if _are_neighbours(chain, layers.chains):
            high = ranges[last + 1].start if last + 1 < len(ranges) else stretch.end
            cuts = choose_cuts(sequence, bounds[first : last + 2], low, high)
            groups.append(ranges_between(cuts))
            low = cuts[-1]
        else:
            groups.append([ranges[i] for i in chain])
            low = max(low, ranges[last].stop)
    return groups


def _are_neighbours(chain: list[int], chains: list[list[int]]) -> bool:
    """Whether the copies of a chain follow one another, and no other chain overlaps them."""
    first, last = chain[0], chain[-1]
    without_gaps = len(chain) > 1 and last - first + 1 == len(chain)
    return without_gaps and all(max(first, other[0]) > min(last, other[-1]) for other in chains if other is not chain)


# ---- layers inside of copies -----------------------------------------------------------------------------------------


def _refine(sequence: OperationSequence, group: Group) -> list[Group]:
    """The layers inside of copies that are stages; the group itself if its copies are no stages.

    These layers are items of one container, and the cuts between them are as narrow as the cuts between the copies.
    """
    if not has_names(sequence, group[0]):  # `_split` cuts these copies
        return [group]
    width = _boundary_width(sequence, group)
    inner = [found for copy in group for found in _layers_of_stage(sequence, copy, width)]
    if not inner:
        return [group]
    return [finer for found in inner for finer in _refine(sequence, found)]


def _layers_of_stage(sequence: OperationSequence, copy: range, width: float) -> list[Group]:
    """Groups of layers inside of a stage, with cuts of at most `width` bytes; none if the copy is a layer that has a list."""
    groups = _groups_inside(sequence, copy)
    layers = sorted((layer for group in groups for layer in group), key=lambda layer: layer.start)
    of_items = [group for group in groups if _are_items(sequence, group)]
    narrow = [group for group in of_items if _is_narrow(sequence, group, copy, layers, width)]
    return narrow if _cover_most_uses(sequence, narrow, copy) else []


def _boundary_width(sequence: OperationSequence, group: Group) -> float:
    """The bytes that cross the narrowest boundary between layers."""
    return min((sequence.crossing[layer.start] for layer in group[1:]), default=0) * _ROUNDING


def _cover_most_uses(sequence: OperationSequence, groups: list[Group], copy: range) -> bool:
    """Whether these layers hold at least half of a copy's parameter uses."""
    uses = sum(len(uses_in(sequence, layer)) for group in groups for layer in group)
    return 2 * uses >= len(uses_in(sequence, copy))


def _groups_inside(sequence: OperationSequence, copy: range) -> list[Group]:
    uses = uses_in(sequence, copy)
    if not uses:
        return []
    first = sequence.uses.index(uses[0])
    return _search(sequence, _Stretch(copy.start, copy.stop, first, first + len(uses)))


def _are_items(sequence: OperationSequence, group: Group) -> bool:
    """Whether two or more ranges are layers: items of one class of a container, or ranges outside of all containers."""
    if len(group) < 2:
        return False
    of = containers(sequence, group)
    if not of:
        return not _in_items(sequence, group)
    return any(has_items_of_one_class(sequence, group, path) for path in of)


def _in_items(sequence: OperationSequence, group: Group) -> bool:
    """Whether any operation of these ranges lies in an item of a container."""
    return any(items(sequence.paths[position]) for layer in group for position in layer)


def _is_narrow(sequence: OperationSequence, group: Group, copy: range, layers: Group, width: float) -> bool:
    """Whether at most `width` bytes, without skips, cross each cut of a group. `layers` are all layers of its copy."""
    cuts = [layer.start for layer in group[1:]]
    return all(sequence.crossing[cut] <= width or bytes_without_skips(sequence, cut, copy, layers) <= width for cut in cuts)


# ---- layers by module names ------------------------------------------------------------------------------------------


def _layer_lists(sequence: OperationSequence) -> dict[Path, list[Traversal]]:
    """The containers whose items read one another in every traversal."""
    return {
        path: traversals
        for path, traversals in list_traversals(sequence).items()
        if all(_is_chain(sequence, traversal) for traversal in traversals)
    }


def _is_chain(sequence: OperationSequence, spans: list[range]) -> bool:
    """Whether at least half of these ranges have a predecessor among them."""
    return 2 * len(find_predecessors(sequence, extended_to_next(spans))) >= len(spans)


def _aligned(sequence: OperationSequence, groups: list[Group], lists: dict[Path, list[Traversal]]) -> list[Group]:
    """The groups. If a copy uses parameters of several items of one list, the items of that list replace the copies."""
    copies = [copy for group in groups for copy in group]
    crossed = [path for path in _innermost(lists) if _holds_several_items(sequence, copies, path)]
    traversals = _merge_interleaved([traversal for path in crossed for traversal in lists[path]])
    of_items = list(filter(None, (_between_items(sequence, traversal) for traversal in traversals)))
    taken = [range(group[0].start, group[-1].stop) for group in of_items]
    apart = ([copy for copy in group if not _overlaps_any(copy, taken)] for group in groups)
    return [*of_items, *filter(None, apart)]


def _holds_several_items(sequence: OperationSequence, copies: list[range], path: Path) -> bool:
    """Whether one of these copies uses parameters of several items of a container."""
    return any(len(_items_used(sequence, copy, path)) > 1 for copy in copies)


def _innermost(lists: dict[Path, list[Traversal]]) -> list[Path]:
    """The lists that contain no other list."""
    return [path for path in lists if not any(other != path and other[: len(path)] == path for other in lists)]


def _overlaps_any(span: range, others: list[range]) -> bool:
    return any(span.start < other.stop and other.start < span.stop for other in others)


def _merge_interleaved(traversals: list[Traversal]) -> list[Traversal]:
    """The traversals of lists. Traversals whose items alternate are merged into one."""
    merged: list[Traversal] = []
    end = 0
    for spans in sorted(traversals, key=lambda spans: spans[0].start):
        if merged and spans[0].start < end:
            merged[-1] = sorted([*merged[-1], *spans], key=lambda span: span.start)
        else:
            merged.append(spans)
        end = max(end, spans[-1].stop)
    return merged


def _between_items(sequence: OperationSequence, spans: Traversal) -> Group:
    """The items as ranges, each up to the beginning of the next item. Forbidden cuts are left out."""
    cuts = sorted({*(span.start for span in spans), max(span.stop for span in spans)})
    return ranges_between([cut for cut in cuts if math.isfinite(sequence.crossing[cut])])


def _items_used(sequence: OperationSequence, span: range, path: Path) -> set[Path]:
    """The items of a container whose parameters a range uses."""
    return {item for use in uses_in(sequence, span) for item in items(sequence.paths[use.position]) if item[:-1] == path}


@dataclass(frozen=True)
class _NamedGroup:
    """A group of layers, and the containers whose items they are made of."""

    layers: Group
    containers: set[Path]


def _without_inner(sequence: OperationSequence, groups: list[Group]) -> list[_NamedGroup]:
    """The groups, without groups that lie inside of a single item that is a layer of another group."""
    named = [_NamedGroup(group, containers(sequence, group) if len(group) > 1 else set()) for group in groups]
    return [group for group in named if not any(inside_an_item(sequence, group.layers, other.containers) for other in named)]


def _split(sequence: OperationSequence, layer: range, group: _NamedGroup) -> list[range]:
    """Cut a copy that holds several layers: between connected components or, with only one, at cuts as narrow as its boundary.

    With module names, these cuts lie between items of the containers that the group is made of. Without names, they lie at the
    layers of repeats within the copy.
    """
    apart = components(sequence, layer)
    if len(apart) > 1:
        return apart
    if has_names(sequence, layer):
        cuts = item_cuts(sequence, group.containers, layer)
    else:
        cuts = {cut for inner in _groups_inside(sequence, layer) for r in inner for cut in (r.start, r.stop)}
    inside = ranges_between(sorted({layer.start, *(cut for cut in cuts if layer.start < cut < layer.stop), layer.stop}))
    width = _boundary_width(sequence, group.layers)
    narrow = [r.start for r in inside[1:] if _is_narrow(sequence, [layer, r], layer, inside, width)]
    return ranges_between([layer.start, *narrow, layer.stop])
