"""Which parameters and which optimizer state are in memory and which on disk: a pure function of their sizes and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 1 << 20  # bytes: smaller tensors stay in memory, as they are most of the transfers and hardly any of the bytes


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of one parameter: of its master, and of its optimizer state; and whether they may leave memory.

    master_is_there, state_is_there  whether they are on disk already, where they stay
    """

    master: int
    state: int
    may_leave: bool = True
    master_is_there: bool = False
    state_is_there: bool = False

    @property
    def leaves(self) -> bool:
        return self.may_leave and self.master >= SMALL


@dataclass(frozen=True)
class DiskPlacement:
    """For each parameter, in order, whether its master and its optimizer state are on disk.

    on_disk, in_memory  bytes of both
    """

    masters: tuple[bool, ...]
    states: tuple[bool, ...]
    on_disk: int
    in_memory: int


def place_on_disk(sizes: Sequence[TensorSizes], budget: int) -> DiskPlacement:
    """Keep at most `budget` bytes of masters and state in memory, as far as small tensors allow.

    Optimizer state goes first: nothing but its update reads it. What stays in memory is spread evenly over the model, so that
    the work of the disk is even over the step. What is on disk already stays there.
    """
    total = sum(each.master + each.state for each in sizes)
    masters, states = [each.master_is_there for each in sizes], [each.state_is_there for each in sizes]
    left = total - _sum_of(sizes, masters, states)
    movable = [each.state if each.leaves and not each.state_is_there else 0 for each in sizes]
    states = _either(states, _spread(movable, left - budget))
    left = total - _sum_of(sizes, masters, states)
    movable = [each.master if each.leaves and not each.master_is_there else 0 for each in sizes]
    masters = _either(masters, _spread(movable, left - budget))
    on_disk = _sum_of(sizes, masters, states)
    return DiskPlacement(tuple(masters), tuple(states), on_disk, total - on_disk)


def _sum_of(sizes: Sequence[TensorSizes], masters: Sequence[bool], states: Sequence[bool]) -> int:
    """Bytes of these masters and of this state."""
    chosen = zip(sizes, masters, states, strict=True)
    return sum(each.master * master + each.state * state for each, master, state in chosen)


def _either(some: Sequence[bool], others: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(some, others, strict=True)]


def _spread(sizes: Sequence[int], excess: int) -> tuple[bool, ...]:
    """Choose entries of at least `excess` bytes together, or all that have bytes, evenly among them."""
    total = sum(sizes)
    part = min(1.0, max(0, excess) / total) if total else 0.0
    chosen, passed, taken = [], 0, 0
    for size in sizes:
        passed += size
        is_due = bool(size) and taken < passed * part
        taken += size if is_due else 0
        chosen.append(is_due)
    return tuple(chosen)
