"""What module names tell of layers: items of containers (`nn.ModuleList`, `nn.Sequential`), read off the paths of operations.

Names serve as hints for what labels cannot tell: a first layer that differs from the others, two kinds of layer that
alternate. They never decide that two layers are equal.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict

from .operation_sequence import OperationSequence

Path = tuple[str, ...]


@functools.cache
def items(path: Path) -> list[Path]:
    """Prefixes of a module path that end in an index: the items of containers that it lies in."""
    return [path[: i + 1] for i, part in enumerate(path) if part.isdigit()]


def item_depth(sequence: OperationSequence, cut: int) -> int:
    """How deep the outermost container item lies that begins or ends at a cut, as far as names tell; 99 for none."""
    if not 0 < cut < len(sequence):
        return 0
    before, after = set(items(sequence.paths[cut - 1])), set(items(sequence.paths[cut]))
    return min((len(item) for item in before ^ after), default=99)


def containers(sequence: OperationSequence, group: list[range]) -> set[Path]:
    """Module containers whose items the ranges of a group are made of: each range has items of its own."""
    seen: defaultdict[Path, list[set[str]]] = defaultdict(lambda: [set() for _ in group])
    for index, layer in enumerate(group):
        for path in {sequence.paths[position] for position in layer}:
            for item in items(path):
                seen[item[:-1]][index].add(item[-1])
    return {container for container, sets in seen.items() if all(sets) and sum(map(len, sets)) == len(set().union(*sets))}


def has_alike_items(sequence: OperationSequence, group: list[range], container: Path) -> bool:
    """Whether ranges hold several items of one class of a container, as layers are; parts of one layer have classes of their own."""
    found = {
        item for layer in group for path in {sequence.paths[p] for p in layer} for item in items(path) if item[:-1] == container
    }
    return max(Counter(map(sequence.classes.get, found)).values(), default=0) > 1


def inside_an_item(sequence: OperationSequence, group: list[range], of: set[Path]) -> bool:
    """Whether a group lies within a single item of these containers: a layer is not cut where its siblings are not."""
    found = {
        next((i for i in items(sequence.paths[p]) if i[:-1] in of), None) for layer in group for p in layer if sequence.paths[p]
    }
    return len(found) == 1 and None not in found


def item_cuts(sequence: OperationSequence, of: set[Path], span: range) -> set[int]:
    """Cuts where an item of one of these containers ends or begins. Operations without a name go on as before."""
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


def stacks(sequence: OperationSequence) -> dict[Path, list[list[range]]]:
    """Containers with several items of one class that hold modules: for each pass over the items, the range of the line of each.

    A stack that is called twice is passed over twice. Only containers with several items in every pass.
    """
    visits: dict[Path, list[list]] = {}  # by container, in order: item, first and last position
    for position, path in enumerate(sequence.paths):
        for item in items(path):
            of_container = visits.setdefault(item[:-1], [])
            if not of_container or of_container[-1][0] != item:
                of_container.append([item, position, position])
            of_container[-1][2] = position
    found = {}
    for container, visited in visits.items():
        classes = Counter(sequence.classes.get(item) for item in {v[0] for v in visited} if item in sequence.composed)
        passes = _passes(visited)
        if max(classes.values(), default=0) > 1 and min(map(len, passes)) > 1:
            found[container] = passes
    return found


def _passes(visited: list[list]) -> list[list[range]]:
    """The ranges of visits of items, in lists that hold each item once."""
    passes: list[list[range]] = []
    seen: set[Path] = set()
    for item, first, last in visited:
        if not passes or item in seen:
            passes.append([])
            seen = set()
        seen.add(item)
        passes[-1].append(range(first, last + 1))
    return passes


def has_names(sequence: OperationSequence, span: range) -> bool:
    """Whether any operation of a range lies in a module with a name."""
    return any(sequence.paths[position] for position in span)
