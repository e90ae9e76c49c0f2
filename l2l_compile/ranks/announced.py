"""An announcement under way: this rank has told the others what it begins, and may go on before it has heard of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from l2l_compile.errors import RankError
from l2l_compile.ranks.announcements import Path, difference

Refuse = Callable[[list[list[int]]], None]


class Announced:
    """What all ranks announce at one place.

    finish  waits for the other ranks, and raises if one has failed
    refuse  is called with the numbers that the ranks tell, if all begin the same action, and may raise
    """

    def __init__(
        self,
        path: Path,
        gathered: torch.Tensor,
        work: dist.Work,
        finish: Callable[[dist.Work], object],
        refuse: Refuse | None,
        group: dist.ProcessGroup,
    ):
        self._path, self._gathered, self._work, self._finish = path, gathered, work, finish
        self._refuse, self._group = refuse, group
        self._guard = threading.Lock()
        self._told: list[list[int]] | None = None
        self._error: Exception | None = None

    def told(self) -> list[list[int]]:
        """Wait for the other ranks. Returns the numbers that each tells. Raises `RankError` if they announce other actions."""
        self._finish(self._work)
        with self._guard:
            if self._told is None and self._error is None:
                try:
                    self._told = self._compared()
                except Exception as error:  # noqa: BLE001 - raised below, and at each further look
                    self._error = error
        if self._error is not None:
            raise self._error
        assert self._told is not None
        return self._told

    def look(self) -> None:
        """Raise what `told` would raise, if all ranks have announced by now."""
        if self._work.is_completed():
            self.told()

    def _compared(self) -> list[list[int]]:
        begins, numbers, rows = self._path.begins(), self._path.numbers(), self._gathered.tolist()
        tell: list[list[int]] = [row[len(numbers) :] for row in rows]
        if self._refuse is not None and all(row[: len(begins)] == begins for row in rows):
            self._refuse(tell)
        if any(row[: len(numbers)] != numbers for row in rows):
            paths: Sequence[Any] = [None] * len(rows)
            dist.all_gather_object(paths, self._path, group=self._group)
            raise RankError(difference(paths))
        return tell
