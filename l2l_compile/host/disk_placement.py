"""Which parameters, optimizer state and copies for the link are in memory and which on disk: a pure function of sizes and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 1 << 20  # bytes: smaller tensors stay in memory, as they are most of the transfers and hardly any of the bytes


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of one parameter: of its master, of its optimizer state, and of its copy that crosses the link; and whether they may leave memory.

    master_is_there, state_is_there  whether they are on disk already, where they stay
    """

    master: int
    state: int
    may_leave: bool = True
    copy: int = 0
    master_is_there: bool = False
    state_is_there: bool = False

    @property
    def leaves(self) -> bool:
        return self.may_leave and self.master >= SMALL


@dataclass(frozen=True)
class DiskPlacement:
    """For each parameter, in order, whether its master, its optimizer state and its copy for the link are on disk.

    on_disk, in_memory  bytes of all
    """

    masters: tuple[bool, ...]
    states: tuple[bool, ...]
    on_disk: int
    in_memory: int
    copies: tuple[bool, ...] = ()


def place_on_disk(sizes: Sequence[TensorSizes], budget: int, *, only_copies: bool = False) -> DiskPlacement:
    """Keep at most `budget` bytes of masters, state and copies in memory, as far as small tensors allow.

    Optimizer state goes first: nothing but its update reads it. Copies go last: forward, backward and the update read them. What stays
    in memory is spread evenly over the model, so that the work of the disk is even over the step. What is on disk already stays there. With
    `only_copies`, large masters and their state are on disk whatever the budget.
    """
    total = sum(each.master + each.state + each.copy for each in sizes)
    in_memory = total - sum(each.master * each.master_is_there + each.state * each.state_is_there for each in sizes)
    placed = []
    for kind in ("state", "master", "copy"):
        there = [getattr(each, f"{kind}_is_there", False) for each in sizes]
        of_kind = [getattr(each, kind) for each in sizes]
        may_go = [size if e.leaves and not is_there else 0 for e, size, is_there in zip(sizes, of_kind, there, strict=True)]
        goes = _spread(may_go, sum(may_go) if only_copies and kind != "copy" else in_memory - budget)
        in_memory -= sum(size for size, is_gone in zip(may_go, goes, strict=True) if is_gone)
        placed.append(tuple(a or b for a, b in zip(goes, there, strict=True)))
    states, masters, copies = placed
    return DiskPlacement(masters, states, total - in_memory, in_memory, copies)


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
