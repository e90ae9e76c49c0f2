"""Announcements: before a joint action, ranks exchange a few whole numbers. Numbers that differ show ranks out of step."""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ActionKind(enum.IntEnum):
    """The kind of action that a rank is about to begin. Drains are alike, whatever each rank does them for."""

    FORWARD = 1
    BACKWARD = 2
    NORM = 3
    STEP = 4
    DRAIN = 5
    DRAIN_TO_EVALUATE = 6
    DRAIN_TO_CHANGE = 7
    DRAIN_TO_END = 8


@dataclass(frozen=True)
class Path:
    """The facts of an announcement, which must be equal on all ranks.

    kind         the action that begins
    collectives  the collectives of the action, as text, one entry each
    forwards     how many forwards have begun so far
    steps        how many steps optimizers of sharded parameters have taken
    train        whether a backward may follow
    settings     numbers of the parameter groups of the optimizer that stepped last, as "lr=0.1"
    options      names and values of the options with which training computes
    """

    kind: ActionKind
    collectives: tuple[str, ...]
    forwards: int
    steps: int
    train: bool
    settings: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def begins(self) -> list[int]:
        """The numbers that say which action begins. If they differ, whatever else differs may follow from that."""
        return [min(self.kind, ActionKind.DRAIN), self.forwards, self.steps, self.train]

    def numbers(self) -> list[int]:
        return [
            *self.begins(),
            number_of("\n".join(self.collectives).encode()),
            number_of("\n".join(self.settings).encode()),
            number_of(repr(self.options).encode()),
        ]

    def __str__(self) -> str:
        drains = f"goes back with what forward {self.forwards} has left in flight"
        what = {
            ActionKind.FORWARD: f"begins forward {self.forwards}, {'to train' if self.train else 'without gradients'}",
            ActionKind.BACKWARD: f"begins a backward after forward {self.forwards}",
            ActionKind.NORM: f"sums the norm of the gradients of forward {self.forwards}",
            ActionKind.STEP: f"begins optimizer step {self.steps + 1}",
            ActionKind.DRAIN: f"{drains} (state_dict(), l2l_compile.synchronize, p.grad)",
            ActionKind.DRAIN_TO_EVALUATE: f"{drains}, before a forward without gradients",
            ActionKind.DRAIN_TO_CHANGE: f"{drains}, before another program (a new length, model.eval()) or number of micro-batches",
            ActionKind.DRAIN_TO_END: f"{drains}, since its process or its process groups end",
        }[self.kind]
        return f"{what}, after {self.steps} optimizer step{'s' * (self.steps != 1)}"


def number_of(content: bytes) -> int:
    """A 64-bit hash: contents that differ have different numbers."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def difference(paths: Sequence[Path]) -> str:
    """The text of the error: which action each rank begins and, if that is the same one, where the sequences of collectives first differ."""
    members: dict[Path, list[int]] = {}
    for rank, path in enumerate(paths):
        members.setdefault(path, []).append(rank)
    lines = ["the ranks have taken different paths; all of them have to run the same programs in the same order"]
    for path, ranks in members.items():
        lines.append(f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {path}")
    if other_options := _other_options(members):
        return "\n".join([*lines, *other_options])
    lines += _other_settings(members)
    lines += _other_collectives(members)
    return "\n".join(lines)


def _other_options(members: Mapping[Path, Sequence[int]]) -> list[str]:
    """Lines on options that ranks do not have in common."""
    first, *others = members.items()
    lines = []
    for path, ranks in others:
        lines += [
            f"  option '{name}' is {ours} on rank {first[1][0]}, and {theirs} on rank {ranks[0]}: give all ranks the same"
            for (name, ours), (_, theirs) in zip(
                first[0].options, path.options, strict=False
            )  # a call without gradients tells none
            if ours != theirs
        ]
    return lines


def _other_settings(members: Mapping[Path, Sequence[int]]) -> list[str]:
    """Lines on ranks that have taken as many steps as rank 0, but with other optimizer settings."""
    first, *others = members.items()
    lines = []
    for path, ranks in others:
        if path.steps == first[0].steps and path.settings != first[0].settings:
            ours, theirs = (
                sorted({*a} - {*b}) for a, b in ((first[0].settings, path.settings), (path.settings, first[0].settings))
            )
            lines.append(f"  the last optimizer step had {', '.join(ours)} on rank 0 and {', '.join(theirs)} on rank {ranks[0]}")
    return lines


def _other_collectives(members: Mapping[Path, Sequence[int]]) -> list[str]:
    """Lines on ranks that begin the same action as rank 0, but with other collectives: the first that differs."""
    first, *others = members.items()
    lines = []
    for path, ranks in others:
        if path.begins() == first[0].begins() and path.collectives != first[0].collectives:
            pairs = enumerate(itertools.zip_longest(first[0].collectives, path.collectives, fillvalue="nothing"), start=1)
            number, (ours, theirs) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
            lines.append(f"  collectives part at number {number}: rank 0 has '{ours}', and rank {ranks[0]} '{theirs}'")
    return lines
