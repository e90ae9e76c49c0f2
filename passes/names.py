"""What module names tell of layers: items of containers (`nn.ModuleList`, `nn.Sequential`), read off the paths of operations.

Names serve as hints for what labels cannot tell: a first layer that differs from the others, two kinds of layer that
alternate. They never decide that two layers are equal.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

from .line import Line

Path = tuple[str, ...]


@functools.cache
def items(path: Path) -> list[Path]:
    """Prefixes of a module path that end in an index: the items of containers that it lies in."""
    return [path[: i + 1] for i, part in enumerate(path) if part.isdigit()]


def item_depth(line: Line, cut: int) -> int:
    """How deep the outermost container item lies that begins or ends at a cut, as far as names tell; 99 for none."""
    if not 0 < cut < len(line):
        return 0
    before, after = set(items(line.paths[cut - 1])), set(items(line.paths[cut]))
    return min((len(item) for item in before ^ after), default=99)


def containers(line: Line, group: list[range]) -> set[Path]:
    """Module containers whose items the ranges of a group are made of: each range has items of its own."""
    seen: dict[Path, list[set[str]]] = {}
    for index, layer in enumerate(group):
        for position in layer:
            for item in items(line.paths[position]):
                seen.setdefault(item[:-1], [set() for _ in group])[index].add(item[-1])
    return {
        container
        for container, sets in seen.items()
        if all(sets) and sum(map(len, sets)) == len(set().union(*sets))
    }


def inside_an_item(line: Line, group: list[range], of: set[Path]) -> bool:
    """Whether a group lies within a single item of these containers: a layer is not cut where its siblings are not."""
    found = {
        next((i for i in items(line.paths[p]) if i[:-1] in of), None)
        for layer in group for p in layer if line.paths[p]
    }
    return len(found) == 1 and None not in found


def item_cuts(line: Line, of: set[Path], span: range) -> set[int]:
    """Cuts where an item of one of these containers ends or begins. Operations without a name go on as before."""
    cuts: set[int] = set()
    current: list[Path] = []
    for position in span:
        path = line.paths[position]
        if not path:
            continue
        found = [item for item in items(path) if item[:-1] in of]
        if found != current and position > span.start and math.isfinite(line.crossing[position]):
            cuts.add(position)
        current = found
    return cuts


def stacks(line: Line) -> dict[Path, list[range]]:
    """Containers with several items of one class that hold modules: the range of the line from begin to end of each item, in order.

    Only containers whose items run one after the other, each once.
    """
    spans: dict[Path, list[int]] = {}  # first and last position of each item
    for position, path in enumerate(line.paths):
        for item in items(path):
            spans.setdefault(item, [position, position])[1] = position
    within: dict[Path, list[Path]] = {}
    for item in spans:
        within.setdefault(item[:-1], []).append(item)
    found = {}
    for container, members in within.items():
        classes = Counter(line.classes.get(item) for item in members if item in line.composed)
        ranges = sorted((range(first, last + 1) for first, last in map(spans.get, members)), key=lambda r: r.start)
        in_turn = all(before.stop <= after.start for before, after in itertools.pairwise(ranges))
        if in_turn and max(classes.values(), default=0) > 1:
            found[container] = ranges
    return found


def has_names(line: Line, span: range) -> bool:
    """Whether any operation of a range lies in a module with a name."""
    return any(line.paths[position] for position in span)
