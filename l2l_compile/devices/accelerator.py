"""A device with memory of its own and asynchronous copies: page-locked buffers, slabs, the order of copies and compute.

Device memory of values is allocated and freed on the compute lane only; a copy lane waits for the compute lane
before it writes into new memory, and the executor makes the compute lane wait for every copy that reads a value
before the value is freed. So an allocator that knows one stream never reuses memory while a copy still uses it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from l2l_compile.devices.device import Device, LaneQueue, LinkRates
from l2l_compile.devices.staging import Staging
from l2l_compile.lanes import Lane
from l2l_compile.memory.in_place import locked_bytes
from l2l_compile.memory.pages import PinnedMemory, Pool

_PROBE = 64 << 20  # bytes whose copy tells how fast the link is
_PROBES = 3


class Accelerator(Device):
    """The part of a device that does not depend on how its lanes work."""

    launches_first = takes_norms = True

    def __init__(self, lanes: Mapping[str, LaneQueue], pinned: PinnedMemory, pool: Pool):
        self.lanes, self.pinned, self._pool = lanes, pinned, pool
        self._staging = self._new_staging()
        self.slabs: list[torch.Tensor] = []
        self.kept = {}
        self._rates: LinkRates | None = None

    def _new_staging(self) -> Staging:
        return Staging(self.pinned, self.lanes[Lane.H2D].record, self.wait_on_host)

    @abstractmethod
    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """New memory of the device, allocated on the compute lane."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in page-locked memory."""

    def lock(self, weights: Sequence[torch.Tensor]) -> None:
        """Memory that the user has page-locked (`pin_memory`) stays as it is."""
        super().lock([weight for weight in weights if not self.is_pinned(weight)])

    def _send_weight(self, weight: torch.Tensor, target: torch.Tensor) -> None:
        if locked_bytes(weight) == (0, 0) and weight.is_contiguous() and self.is_pinned(weight):
            target.copy_(weight.detach().view(-1).view(torch.uint8), non_blocking=True)
        else:
            super()._send_weight(weight, target)

    def reserve_slabs(self, count: int, size: int) -> None:
        if len(self.slabs) == count and (not count or self.slabs[0].numel() >= size):
            return
        self.empty_slabs()
        self.slabs = []
        self.slabs = [self.empty(torch.Size([size]), torch.uint8) for _ in range(count)]
        if count:  # not in a recovery: a device that has failed may refuse to record an event
            # the memory may have belonged to a value that compute still reads, and deterministic mode fills it on compute
            self._h2d_after_compute()

    def set_apart(self, size: int) -> torch.Tensor:
        made = self.empty(torch.Size([size]), torch.uint8)
        self._h2d_after_compute()  # the memory may have belonged to a value that compute still reads
        return made

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that is not page-locked goes through the ring: it may be a temporary that is freed before its copy is done."""
        result = self.empty(tensor.shape, tensor.dtype)
        self._h2d_after_compute()  # the memory may have belonged to a value that compute still reads
        if self.is_pinned(tensor) and tensor.is_contiguous():
            result.copy_(tensor.detach(), non_blocking=True)
            self._pool.reads(tensor, self.lanes[Lane.H2D].record())
        else:
            self._staging.send(tensor, result.view(-1).view(torch.uint8))
        return result

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._pool.empty(tensor.shape, tensor.dtype, "a tensor from the device")
        host.copy_(tensor, non_blocking=True)
        self._pool.reads(host, self.lanes[Lane.D2H].record())
        return host

    def host_memory_available(self) -> int:
        """No more than may still be page-locked: copies to other memory would wait for the caller."""
        free, budget = super().host_memory_available(), self.pinned.budget
        return free if budget is None else max(0, min(free, budget - self.pinned.used))

    def link_rates(self) -> LinkRates | None:
        if self._rates is None:
            device = self.empty(torch.Size([_PROBE]), torch.uint8)
            host = self._pool.empty(device.shape, device.dtype, "a measurement of the link")
            self._rates = LinkRates(self._rate(Lane.H2D, device, host), self._rate(Lane.D2H, host, device))
        return self._rates

    def _rate(self, lane: str, target: torch.Tensor, source: torch.Tensor) -> float:
        """Bytes per second of a copy on a lane: of the fastest of a few."""
        times = []

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        for _ in range(_PROBES):
            start = self.now()
            self.lanes[lane].run(copy)
            self.lanes[lane].synchronize()
            times.append(self.now() - start)
        return source.nbytes / max(min(times), 1e-9)

    def _h2d_after_compute(self) -> None:
        self.lanes[Lane.H2D].wait(self.lanes[Lane.COMPUTE].record())
