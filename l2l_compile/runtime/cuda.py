"""An NVIDIA GPU: three streams, pinned host buffers, weight slabs that rotate.

Device memory of values is allocated and freed on the compute stream only; a copy stream waits for the compute stream
before it writes into new memory, and the executor makes the compute stream wait for every copy that reads a value
before the value is freed. So PyTorch's caching allocator never hands memory out while a copy still uses it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..host.wire import Wire
from .device import Device, Lane, aligned


class _Stream(Lane):
    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaDevice(Device):
    """Streams a program through a GPU. `peak_bytes` is the caching allocator's peak of allocated bytes."""

    def __init__(self, device: torch.device):
        self.torch_device = device
        self.lanes = {name: _Stream(device) for name in ("compute", "h2d", "d2h")}
        self._slabs: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = []

    def reserve_slabs(self, count: int, size: int) -> None:
        if len(self._slabs) == count and (not count or self._slabs[0].numel() >= size):
            return
        self._slabs, self._staging = [], []
        with torch.cuda.stream(self.lanes["compute"].stream):
            self._slabs = [torch.empty(size, dtype=torch.uint8, device=self.torch_device) for _ in range(count)]
        self._staging = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copied = [None] * count

    def load_weights(self, slab: int, wire: Wire | None, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._copied[slab] is not None:
            self._copied[slab].synchronize()  # the last copy out of this staging buffer
        staging, target, start = self._staging[slab], self._slabs[slab], 0
        if wire is not None:
            start = wire.buffer.numel()
            target[:start].copy_(wire.buffer, non_blocking=True)
        loaded, offset = wire.in_slab(target) if wire is not None else [], start
        for weight in weights:
            size = weight.numel() * weight.element_size()
            staging[offset : offset + size].view(weight.dtype).view(weight.shape).copy_(weight.detach())
            loaded.append(target[offset : offset + size].view(weight.dtype).view(weight.shape))
            offset += aligned(size)
        target[start:offset].copy_(staging[start:offset], non_blocking=True)
        self._copied[slab] = self.lanes["h2d"].record()
        return loaded

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        compute, h2d = self.lanes["compute"].stream, self.lanes["h2d"].stream
        with torch.cuda.stream(compute):
            result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        h2d.wait_stream(compute)  # the memory may have belonged to a value that compute still reads
        return result.copy_(tensor.detach(), non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

