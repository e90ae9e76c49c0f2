"""Which parameters and which optimizer state are in memory and which on disk: a pure function of their sizes and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 1 << 20  # bytes: smaller tensors stay in memory, as they are most of the transfers and hardly any of the bytes


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of one parameter: of its master, and of its optimizer state; and whether they may leave memory."""

    master: int
    state: int
    may_leave: bool = True

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
    the work of the disk is even over the step.
    """
    total = sum(each.master + each.state for each in sizes)
    states = _spread([each.state if each.leaves else 0 for each in sizes], total - budget)
    left = total - sum(each.state for each, away in zip(sizes, states, strict=True) if away)
    masters = _spread([each.master if each.leaves else 0 for each in sizes], left - budget)
    in_memory = left - sum(each.master for each, away in zip(sizes, masters, strict=True) if away)
    return DiskPlacement(masters, states, total - in_memory, in_memory)


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
