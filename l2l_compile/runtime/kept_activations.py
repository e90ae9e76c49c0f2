"""How much each segment of a program keeps of what its forward computes, so that backward need not compute it again.

A block has levels (`lowering/saving.py`), each of which saves more bytes and more seconds than the one before. Within the options
`keep` and `keep_on_host`, the next level is always that of the block with the most seconds for its bytes, for all micro-batches of its
segments if there is room, else for some of them. So no block has more than two levels in one step, which are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.savings import SavingLevel, Savings

Runs = Callable[[Segment], Sequence[Bindings]]  # the sizes of each micro-batch of a segment


class Room(NamedTuple):
    """Bytes for what forwards keep inside of segments, in both memories."""

    device: int = 0
    host: int = 0

    @property
    def both(self) -> int:
        return self.device + self.host

    def less(self, other: Room) -> Room:
        """What is left beside `other`."""
        return Room(max(0, self.device - other.device), max(0, self.host - other.host))

    def more(self, other: Room) -> Room:
        """Both together."""
        return Room(self.device + other.device, self.host + other.host)

    @staticmethod
    def sum(rooms: Iterable[Room]) -> Room:
        """All of them together."""
        return functools.reduce(Room.more, rooms, Room())


@dataclass(frozen=True)
class KeptPart:
    """What a segment keeps of one micro-batch: a level of its block, its bytes, the seconds that it saves, and where it is kept."""

    level: int
    bytes: int
    seconds: float
    on_host: bool = False


@dataclass(frozen=True)
class KeptLevels:
    """What one segment keeps of each micro-batch (None: nothing), for a backward to which gradients of the outputs `mask` arrive."""

    mask: tuple[bool, ...]
    parts: tuple[KeptPart | None, ...]

    @property
    def kept(self) -> Iterator[KeptPart]:
        return (part for part in self.parts if part is not None)

    @property
    def room(self) -> Room:
        """The bytes that are kept."""
        on_host = sum(part.bytes for part in self.kept if part.on_host)
        return Room(sum(part.bytes for part in self.kept) - on_host, on_host)

    @property
    def seconds(self) -> float:
        """The seconds that they save."""
        return sum(part.seconds for part in self.kept)


Unit = tuple[int, int]  # the index of a segment, and a micro-batch of it


@dataclass(eq=False)
class _Choice:
    """The segments of a block that may keep something, the levels of each micro-batch, and the level that each has (-1: none)."""

    segments: list[Segment]
    mask: tuple[bool, ...]
    levels: list[Sequence[SavingLevel]] = field(default_factory=list)
    at: int = -1
    ends: bool = False
    chosen: dict[Unit, int] = field(default_factory=dict)

    @property
    def has_next(self) -> bool:
        return not self.ends and any(self.at + 1 < len(levels) for levels in self.levels)

    def level(self, number: int, at: int) -> SavingLevel:
        """A level of a micro-batch; those that have fewer levels stay at their last one."""
        levels = self.levels[number]
        return levels[min(at, len(levels) - 1)] if at >= 0 else SavingLevel(0, 0.0)

    def added(self, number: int) -> int:
        """The bytes that the next level adds to a micro-batch of a segment."""
        return self.level(number, self.at + 1).bytes - self.level(number, self.at).bytes

    @property
    def worth(self) -> float:
        """The seconds that the next level saves for its bytes."""
        numbers = range(len(self.levels))
        seconds = sum(self.level(n, self.at + 1).seconds - self.level(n, self.at).seconds for n in numbers)
        return seconds / max(1, sum(map(self.added, numbers)))

    def take(self, room: int, spread: bool) -> int:
        """Take the next level in as many micro-batches as there is room for. Returns its bytes.

        These are the last ones, which backward needs first; with `spread`, they are spread over all segments.
        """
        units = [(segment.index, number) for segment in self.segments for number in range(len(self.levels))]
        most = max(map(self.added, range(len(self.levels))))
        count = min(len(units), room // most) if most > 0 else len(units)
        self.ends = count < len(units)
        taken = _spread(units, count) if spread else units[len(units) - count :]
        size = sum(self.added(number) for _, number in taken)
        self.at += 1
        self.chosen.update(dict.fromkeys(taken, self.at))
        return size

    def part(self, unit: Unit, on_host: bool) -> KeptPart:
        level = self.level(unit[1], self.chosen[unit])
        return KeptPart(min(self.chosen[unit], len(self.levels[unit[1]]) - 1), level.bytes, level.seconds, on_host)


def _spread(units: Sequence[Unit], count: int) -> list[Unit]:
    """So many of the units, at equal distances."""
    return [unit for i, unit in enumerate(units) if (i + 1) * count // len(units) > i * count // len(units)]


def kept_levels(program: Program, runs: Runs, savings: Savings, room: Room) -> dict[int, KeptLevels]:
    """What each segment keeps within these bytes, by its index; a segment that keeps nothing is not in it."""
    choices = _choices(program, runs, savings)
    left = room.both
    while waiting := [choice for choice in choices if choice.has_next]:
        left -= max(waiting, key=lambda choice: choice.worth).take(left, spread=room.host > 0)
    units = {unit: choice for choice in choices for unit in choice.chosen}
    parts = {unit: units[unit].part(unit, on_host) for unit, on_host in _places(units, room)}
    found: dict[int, KeptLevels] = {}
    for choice in choices:
        for segment in choice.segments:
            of_segment = tuple(parts.get((segment.index, number)) for number in range(len(choice.levels)))
            if any(of_segment):
                found[segment.index] = KeptLevels(choice.mask, of_segment)
    return found


def _places(units: Mapping[Unit, _Choice], room: Room) -> Iterator[tuple[Unit, bool]]:
    """Where each unit is kept: whether on the host, where the link has time for it, so that copies are spread over forward.

    What neither memory has room for, since whole units do not fill them, is not kept.
    """
    sizes = {unit: units[unit].part(unit, False).bytes for unit in sorted(units)}
    share, walked, used = min(1.0, room.device / max(1, sum(sizes.values()))), 0, Room()
    for unit, size in sizes.items():
        fits = 0 < room.device >= used.device + size
        fits_host = 0 < room.host >= used.host + size
        if fits and (used.device <= share * walked or not fits_host):
            used = used.more(Room(size, 0))
            yield unit, False
        elif fits_host:
            used = used.more(Room(0, size))
            yield unit, True
        walked += size


def _choices(program: Program, runs: Runs, savings: Savings) -> list[_Choice]:
    """The blocks of which segments may keep something, with their levels at these sizes."""
    found: dict[tuple[Block, tuple[bool, ...]], _Choice] = {}
    for index, mask in masks_of(program).items():
        segment = program.segments[index]
        found.setdefault((segment.block, mask), _Choice([], mask)).segments.append(segment)
    for (block, mask), choice in found.items():
        choice.segments.sort(key=lambda segment: segment.index)
        levels: list[Sequence[SavingLevel]] = [savings.levels(block, b, mask) for b in runs(choice.segments[0])]
        choice.levels = levels if all(levels) else []
    return list(found.values())


def masks_of(program: Program) -> Mapping[int, tuple[bool, ...]]:
    """The outputs whose gradients will arrive, for each segment that may keep something, by its index."""
    if program.backward is None:
        return {}
    backwards = program.backward.graph.find_nodes(op="call_function", target=nodes.backward)
    return {
        nodes.operands(node).segment: tuple(gradient is not None for gradient in nodes.arriving_gradients(node))
        for node in backwards
        if nodes.operands(node).activations is not None or nodes.operands(node).restored_activations is not None
    }
