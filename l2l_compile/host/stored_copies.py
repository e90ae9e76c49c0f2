"""Copies that cross the link and are on disk, where `host_memory` has no room for them.

An update writes such a copy together with its parameter, in the same chunk. A fetch reads it past its mapping into the device's
staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from l2l_compile.disk.disk_store import await_writes
from l2l_compile.disk.stored_entries import write_entries
from l2l_compile.host.wire import Copy, Wires, same_sample, written_values


class StoredCopy(Copy):
    """The copy of one parameter, in a file."""

    is_stored = True

    def follow(self, other: Copy) -> bool:
        """False: the next forward copies the parameter."""
        self._of = None
        return False

    def refresh(self, generation: int) -> Iterator[int]:
        """As `Copy.refresh`. A copy that a forward has made counts as one that an update has written: to make it again takes a disk long."""
        self.generation = generation
        if not (self.unchanged() and same_sample(self.view, self.parameter, generation)):
            write_entries(self.view.view(-1), 0, written_values(self.parameter))
            self.written()
        yield self.view.numel()


class StoredCopies:
    """The copies of one model that are on disk.

    empty       makes a tensor on disk
    is_planned  whether the copy of a parameter is to be there
    """

    def __init__(
        self,
        empty: Callable[[torch.Size, torch.dtype], torch.Tensor],
        wires: Wires,
        is_planned: Callable[[torch.Tensor], bool],
    ):
        self._empty, self._wires, self.has = empty, wires, is_planned
        self._copies: dict[tuple[int, torch.dtype], StoredCopy] = {}

    def place(self) -> None:
        """A plan says anew which copies are on disk: drop those that are in memory. No update is under way."""
        self._wires.drop()

    def load(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a parameter, or of a slice of one, with its values at the beginning of this forward (h2d lane). Raises `DiskError`."""
        copy = self._copy_of(parameter, dtype)
        if copy.generation != self._wires.generation:
            for _ in copy.refresh(self._wires.generation):
                pass
        return await_writes(copy.view)

    def _copy_of(self, parameter: torch.Tensor, dtype: torch.dtype) -> StoredCopy:
        key = id(parameter), dtype
        if key not in self._copies:
            self._copies[key] = copy = StoredCopy(parameter, self._empty(parameter.shape, dtype))
            self._wires.add(copy)
        return self._copies[key]
