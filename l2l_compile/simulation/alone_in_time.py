"""Ranks in virtual time: one process stands for all of them, none fails, and all announce the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.ranks import Ranks


@dataclass(frozen=True)
class HeardOfAll:
    """As `Announced`: what all ranks tell."""

    rows: list[list[int]]

    def told(self) -> list[list[int]]:
        """The numbers of all ranks."""
        return self.rows

    def look(self) -> None:
        """Does nothing: all ranks announce the same."""


class AloneInTime(Ranks):
    """The part of simulated ranks that does not depend on what they exchange."""

    compares_inputs = False

    def meet(self) -> None:
        """The running thread waits for the other ranks."""
        raise NotImplementedError

    def check(self) -> None:
        """Does nothing: no simulated rank fails."""

    def failed(self, error: BaseException) -> None:
        """Does nothing: there is no other process to tell."""

    def connect(self, device: torch.device) -> None:
        """Does nothing: there is no other process."""

    def abort(self) -> None:
        """Does nothing: nothing is under way."""

    def announce(self, *arguments: Any, **named: Any) -> list[list[int]]:
        """All ranks announce the same numbers as this one."""
        self.meet()
        return super().announce(*arguments, **named)

    def announce_soon(
        self,
        kind: ActionKind,
        collectives: tuple[str, ...] = (),
        train: bool = False,
        told: Sequence[int] = (),
        refuse: Callable[[list[list[int]]], None] | None = None,
        options: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Nobody waits, so it takes no time."""
        rows = [list(told) for _ in range(self.world_size)]
        if refuse is not None:
            refuse(rows)
        return HeardOfAll(rows)
