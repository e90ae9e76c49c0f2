"""Stashes on a disk in virtual time: the threads, waits and places in memory are the real ones, the file is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.stash_store import StashExtent, StoredTensor
from l2l_compile.lanes import Lane
from l2l_compile.races import Unwatched
from l2l_compile.runtime.stored_stashes import DiskWorker, StashesOnDisk
from l2l_compile.simulation.simulated_device import SimulatedDevice, SimulatedHost


class SimulatedStashes(StashesOnDisk):
    """As `StashesOnDisk`. Transfers of stashes come before those of updates, which lose this time if they are at work."""

    def __init__(self, device: SimulatedDevice | SimulatedHost, worker: Callable[[int, Unwatched, str], DiskWorker]):
        super().__init__((), device, worker)
        self._clocks = device.clocks

    def begin_forward(self, sizes: Sequence[int]) -> StashExtent | None:
        self.window.begin_forward(sizes)
        return StashExtent(0, sum(sizes)) if sizes else None

    def _check_store(self) -> None:
        """No transfer fails."""

    def _write_one(self, tensor: torch.Tensor, extent: StashExtent) -> StoredTensor:
        self._move(Lane.DISK_WRITE, tensor.nbytes)
        return StoredTensor(tensor.shape, tensor.dtype, None, extent)  # type: ignore[arg-type]  # it has no place

    def _settle(self, stored: Sequence[StoredTensor]) -> None:
        """The thread was at work until they were written."""

    def _begin_to_read(self, stored: StoredTensor, memory: torch.Tensor) -> None:
        self._move(Lane.DISK_READ, stored.nbytes)

    def _move(self, lane: Lane, size: int) -> None:
        seconds = whole_pages(size) / self._clocks.disk_rate("disk_write" if lane is Lane.DISK_WRITE else "disk_read")
        self._clocks.steal_from_updates(lane, self._clocks.thread.now, seconds)
        self._clocks.spend(seconds)
