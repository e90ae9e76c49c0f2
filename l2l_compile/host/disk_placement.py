"""Which parameters, optimizer state and copies for the link are in memory and which on disk: a pure function of sizes and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LATE = 0.3  # part of the updates through the disk: about what forward takes of a step, a quarter if backward computes it again
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


def room_for_late(placed: DiskPlacement, sizes: Sequence[TensorSizes], gradients: Sequence[int], room: int) -> int:
    """The bytes, of `room`, for gradients whose updates wait for the next forward: as many as `late` wants and masters and state give way to."""
    wanted = sum(gradients[i] for i in late(placed, sizes, gradients, room))
    least = sum(each.copy for each in sizes)
    least += sum((not each.leaves and not each.master_is_there) * each.master for each in sizes)
    least += sum((not each.leaves and not each.state_is_there) * each.state for each in sizes)
    return max(0, min(wanted, room - least))


def late(placed: DiskPlacement, sizes: Sequence[TensorSizes], gradients: Sequence[int], room: int) -> list[int]:
    """Positions of the parameters whose updates wait for the next forward, with gradients of at most `room` bytes; `gradients` has those of each.

    Evenly over the model, from its end: what the next forward reads last can wait longest. None if copies are on disk as well, of which one
    in memory saves more of the disk's work.
    """
    chosen: list[int] = []
    if any(placed.copies):
        return chosen
    passed = taken = used = 0
    for i, size in reversed(list(enumerate(_on_disk(placed, sizes)))):
        passed += size
        if taken < _LATE * passed and size and used + gradients[i] <= room:
            chosen.append(i)
            taken, used = taken + size, used + gradients[i]
    return chosen


def _on_disk(placed: DiskPlacement, sizes: Sequence[TensorSizes]) -> list[int]:
    """Bytes on disk of the master and the state of each parameter."""
    places = zip(sizes, placed.masters, placed.states, strict=True)
    return [size.master * master + size.state * state for size, master, state in places]


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
