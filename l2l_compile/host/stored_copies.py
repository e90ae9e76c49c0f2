"""Copies that cross the link and are on disk, where `host_memory` has no room for them.

An update writes such a copy together with its parameter, in the same chunk. A fetch reads it past its mapping into the device's
staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from l2l_compile.disk.disk_store import await_writes
from l2l_compile.disk.stored_entries import write_entries
from l2l_compile.host.wire import Copy, Wires, same_samples, written_values


class StoredCopy(Copy):
    """The copy of one parameter, in a file."""

    is_stored = True

    def follow(self, other: Copy) -> bool:
        """False: the next forward copies the parameter."""
        self._of = None
        return False

    def refresh(self, generation: int, is_same: bool | None = None) -> Iterator[int]:
        """As `Copy.refresh`; one of which nothing is known is made again.

        A copy that a forward has made counts as one that an update has written: to make it again takes a disk long.
        """
        self.generation = generation
        if not is_same:
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

    def load(self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Copies of parameters, or of slices, with their values at the beginning of this forward (h2d lane). Raises `DiskError`."""
        generation = self._wires.generation
        copies = [self._copy_of(parameter, dtype) for parameter, dtype in zip(parameters, dtypes, strict=True)]
        of_earlier = dict.fromkeys(copy for copy in copies if copy.generation != generation)
        kept = [copy for copy in of_earlier if copy.may_be_kept()]
        same = dict(zip(kept, same_samples([(c.view, c.parameter) for c in kept], generation), strict=True))
        for copy in of_earlier:
            for _ in copy.refresh(generation, same.get(copy)):
                pass
        return [await_writes(copy.view) for copy in copies]

    def _copy_of(self, parameter: torch.Tensor, dtype: torch.dtype) -> StoredCopy:
        key = id(parameter), dtype
        if key not in self._copies:
            self._copies[key] = copy = StoredCopy(parameter, self._empty(parameter.shape, dtype))
            self._wires.add(copy)
        return self._copies[key]
