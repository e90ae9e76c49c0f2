"""The host as its own device: work runs immediately, fetches and offloads are aliases, a ledger counts bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from l2l_compile.devices.counted import Counted
from l2l_compile.devices.device import DeviceKind, HostCopy, HostWeights, LaneQueue
from l2l_compile.devices.host import HOST, half_of_the_cores
from l2l_compile.devices.ledger import Ledger
from l2l_compile.lanes import OF_DEVICE
from l2l_compile.memory.heap import apart_from_the_heap
from l2l_compile.memory.pages import Pool, unlocked

_LARGE = 4 << 20  # bytes: large enough that new pages cost little next to the computation


class _Inline(LaneQueue):
    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuDevice(Counted):
    """Runs a program on the host, where weights and stashes are already: nothing is copied.

    `peak_bytes` counts the bytes that a separate device would hold: weights from fetch to release, activations and
    gradients while program values hold them, and within a block the results of its operations, each by itself.
    """

    overlaps = keeps_slabs = False
    is_host = True

    def __init__(self) -> None:
        self.torch_device = HOST
        self.lanes = dict.fromkeys(OF_DEVICE, _Inline())
        self.ledger = Ledger()
        self.slabs: list[torch.Tensor] = []
        self.kept = {}
        self.pinned = unlocked()  # no copy is asynchronous
        self._pool = Pool(self.pinned)

    def reserve_slabs(self, count: int, size: int) -> None:
        if count == 0:
            self.ledger.clear()
        if len(self.slabs) != count or not count:
            self.slabs = [
                torch.empty(0, dtype=torch.uint8) for _ in range(count)
            ]  # empty until `load_copies`: nothing else needs memory

    def load_copies(self, slab: torch.Tensor, copies: Sequence[HostCopy], size: int) -> torch.Tensor:
        if slab.numel() < size:
            slab.resize_(size)
        for copy in copies:
            flat = copy.tensor.detach().reshape(-1).view(torch.uint8)
            slab[copy.start : copy.start + flat.numel()] = flat
        return slab[:size]

    def set_apart(self, size: int) -> torch.Tensor:
        """No memory: weights are read where they are."""
        return torch.empty(0, dtype=torch.uint8)

    def send(self, slab: torch.Tensor, wire: HostWeights, start: int, end: int) -> None:
        """Does nothing: the wire is read where it is."""

    def load_weights(
        self, slab: torch.Tensor, wire: HostWeights | None, weights: Sequence[torch.Tensor], unread: frozenset[int] = frozenset()
    ) -> list[torch.Tensor]:
        return [*(wire.views if wire is not None else ()), *(_alone(w.detach().contiguous()) for w in weights)]

    def stored_bytes(self, weight: torch.Tensor) -> int:
        """0: a weight on disk is read through its mapping, by the operations on it."""
        return 0

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        part_of_more = tensor.untyped_storage().nbytes() > tensor.nbytes
        if part_of_more:  # the ledger counts storages
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor.detach().contiguous()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def download_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def running(self) -> AbstractContextManager:
        """Large tensors, which stand for device memory here, are allocated apart from the host's heap."""
        return apart_from_the_heap(_LARGE)

    def host_threads(self) -> int:
        return half_of_the_cores()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in the same memory, with a storage of exactly its size, since the ledger counts storages."""
    storage, size = tensor.untyped_storage(), tensor.nbytes
    if storage.nbytes() == size:
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage[start : start + size], 0, tensor.shape)  # type: ignore[call-overload]  # strides are optional


CPU = DeviceKind(
    name=HOST.type,
    open=lambda device, pinned_memory: CpuDevice(),
    complaint=lambda: None,
    resolve=lambda device: HOST,
    pins_memory=False,
    identity=lambda device: (),
)
