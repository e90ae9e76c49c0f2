"""Layers by module names: items of containers (`nn.ModuleList`, `nn.Sequential`), found from the module paths of operations.

Names serve as hints where labels do not suffice: a first layer that differs from the others, two kinds of layer that
alternate. They never decide that two layers are equal.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from l2l_compile.passes.operation_sequence import OperationSequence

Path = tuple[str, ...]


@functools.cache
def items(path: Path) -> list[Path]:
    """The container items that a module path lies in: the prefixes of the path that end in an index."""
    return [path[: i + 1] for i, part in enumerate(path) if part.isdigit()]


def item_depth(sequence: OperationSequence, cut: int) -> int:
    """Path length of the outermost container item that begins or ends at a cut; 99 for none, 0 at an end of the sequence."""
    if not 0 < cut < len(sequence):
        return 0
    before, after = set(items(sequence.paths[cut - 1])), set(items(sequence.paths[cut]))
    return min((len(item) for item in before ^ after), default=99)


def containers(sequence: OperationSequence, group: list[range]) -> set[Path]:
    """The module containers of which every range of a group holds items, and no two ranges hold the same item."""
    items_of: defaultdict[Path, list[set[Path]]] = defaultdict(lambda: [set() for _ in group])
    for index, layer in enumerate(group):
        for item in _items_in(sequence, layer):
            items_of[item[:-1]][index].add(item)
    return {container for container, by_range in items_of.items() if all(by_range) and _are_disjoint(by_range)}


def _are_disjoint(sets: list[set[Path]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


def _items_in(sequence: OperationSequence, span: range) -> set[Path]:
    """The items of containers that operations of a range lie in."""
    paths = {sequence.paths[position] for position in span}
    return {item for path in paths for item in items(path)}


def has_items_of_one_class(sequence: OperationSequence, group: list[range], container: Path) -> bool:
    """Whether the ranges hold several items of a container with the same class. Parts of one layer have different classes."""
    found = {item for layer in group for item in _items_in(sequence, layer) if item[:-1] == container}
    return max(Counter(map(sequence.classes.get, found)).values(), default=0) > 1


def inside_an_item(sequence: OperationSequence, group: list[range], of: set[Path]) -> bool:
    """Whether a group lies within a single item of these containers. Such a group would cut one layer and not its siblings."""
    found = {
        next((i for i in items(sequence.paths[p]) if i[:-1] in of), None) for layer in group for p in layer if sequence.paths[p]
    }
    return len(found) == 1 and None not in found


def item_cuts(sequence: OperationSequence, of: set[Path], span: range) -> set[int]:
    """Cuts where an item of one of these containers ends or begins. An operation without a module path ends no item."""
    cuts: set[int] = set()
    current: list[Path] = []
    for position in span:
        path = sequence.paths[position]
        if not path:
            continue
        found = [item for item in items(path) if item[:-1] in of]
        if found != current and position > span.start and math.isfinite(sequence.crossing[position]):
            cuts.add(position)
        current = found
    return cuts


Traversal = list[range]  # the range of operations of each item of a container, in the order of calls


def list_traversals(sequence: OperationSequence) -> dict[Path, list[Traversal]]:
    """The containers that may be lists of layers, with their traversals. A list that is called twice has two traversals.

    Such a container has several items of one class that hold modules, and each of its traversals calls several items.
    """
    found = {}
    for container, visits in _visits(sequence).items():
        composed = {visit.item for visit in visits if visit.item in sequence.composed}
        most_of_a_class = max(Counter(map(sequence.classes.get, composed)).values(), default=0)
        traversals = _traversals(visits)
        if most_of_a_class > 1 and min(map(len, traversals)) > 1:
            found[container] = traversals
    return found


@dataclass
class _Visit:
    """A call of an item of a container: from its first operation to its last one."""

    item: Path
    first: int
    last: int


def _visits(sequence: OperationSequence) -> dict[Path, list[_Visit]]:
    """The calls of the items of each container, in order."""
    found: defaultdict[Path, list[_Visit]] = defaultdict(list)
    for position, path in enumerate(sequence.paths):
        for item in items(path):
            visits = found[item[:-1]]
            if not visits or visits[-1].item != item:
                visits.append(_Visit(item, position, position))
            visits[-1].last = position
    return found


def _traversals(visits: list[_Visit]) -> list[Traversal]:
    """The ranges of the visits, in lists that hold each item at most once."""
    traversals: list[Traversal] = []
    seen: set[Path] = set()
    for visit in visits:
        if not traversals or visit.item in seen:
            traversals.append([])
            seen = set()
        seen.add(visit.item)
        traversals[-1].append(range(visit.first, visit.last + 1))
    return traversals


def has_names(sequence: OperationSequence, span: range) -> bool:
    """Whether any operation of a range lies in a module with a name."""
    return any(sequence.paths[position] for position in span)
