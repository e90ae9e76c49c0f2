"""How much each segment of a program keeps of what its forward computes, so that backward need not compute it again.

A block has levels (`lowering/saving.py`), each of which saves more bytes and more seconds than the one before. Within the option
`keep`, the next level is always that of the block with the most seconds for its bytes, for all segments of the block if there is
room, else for its last segments. So no block has more than two levels in one step, which are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.savings import SavingLevel, Savings

Runs = Callable[[Segment], Sequence[Bindings]]  # the sizes of each micro-batch of a segment


@dataclass(frozen=True)
class KeptLevel:
    """What one segment keeps: a level of its block, its bytes and the seconds that it saves in all micro-batches, and the outputs whose
    gradients will arrive.
    """

    level: int
    bytes: int
    seconds: float
    mask: tuple[bool, ...]


@dataclass(eq=False)
class _Choice:
    """The segments of a block that may keep something, its levels, and the level of each of these segments (-1: none)."""

    segments: list[Segment]
    mask: tuple[bool, ...]
    levels: Sequence[SavingLevel] = ()
    at: int = -1
    ends: bool = False
    chosen: dict[int, int] = field(default_factory=dict)

    def next(self) -> tuple[int, float]:
        """Bytes and seconds that the next level adds for one segment."""
        before = self.levels[self.at] if self.at >= 0 else SavingLevel(0, 0.0)
        after = self.levels[self.at + 1]
        return after.bytes - before.bytes, after.seconds - before.seconds


def kept_levels(program: Program, runs: Runs, savings: Savings, budget: int) -> dict[int, KeptLevel]:
    """What each segment keeps within a budget of bytes, by its index; a segment that keeps nothing is not in it."""
    choices = _choices(program, runs, savings)
    room = budget
    while waiting := [c for c in choices if not c.ends and c.at + 1 < len(c.levels)]:
        best = max(waiting, key=lambda choice: choice.next()[1] / max(choice.next()[0], 1))
        size, _ = best.next()
        count = len(best.segments) if size <= 0 else min(len(best.segments), room // size)
        best.at += 1
        best.ends = count < len(best.segments)
        for segment in best.segments[len(best.segments) - count :]:
            best.chosen[segment.index] = best.at
        room -= count * size
    return {
        index: KeptLevel(level, choice.levels[level].bytes, choice.levels[level].seconds, choice.mask)
        for choice in choices
        for index, level in choice.chosen.items()
    }


def _choices(program: Program, runs: Runs, savings: Savings) -> list[_Choice]:
    """The blocks of which segments may keep something, with their levels at these sizes."""
    found: dict[tuple[Block, tuple[bool, ...]], _Choice] = {}
    for index, mask in masks_of(program).items():
        segment = program.segments[index]
        found.setdefault((segment.block, mask), _Choice([], mask)).segments.append(segment)
    for (block, mask), choice in found.items():
        choice.segments.sort(key=lambda segment: segment.index)
        of_runs = [savings.levels(block, bindings, mask) for bindings in runs(choice.segments[0])]
        choice.levels = _together(of_runs) if all(of_runs) else ()
    return list(found.values())


def _together(of_runs: Sequence[Sequence[SavingLevel]]) -> list[SavingLevel]:
    """The levels of all micro-batches together."""
    at = [[levels[min(number, len(levels) - 1)] for levels in of_runs] for number in range(max(map(len, of_runs)))]
    return [SavingLevel(sum(level.bytes for level in levels), sum(level.seconds for level in levels)) for levels in at]


def masks_of(program: Program) -> Mapping[int, tuple[bool, ...]]:
    """The outputs whose gradients will arrive, for each segment that may keep something, by its index."""
    if program.backward is None:
        return {}
    backwards = program.backward.graph.find_nodes(op="call_function", target=nodes.backward)
    return {
        nodes.operands(node).segment: tuple(gradient is not None for gradient in nodes.arriving_gradients(node))
        for node in backwards
        if nodes.operands(node).activations is not None
    }
