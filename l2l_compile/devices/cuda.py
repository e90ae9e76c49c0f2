"""An NVIDIA GPU: three streams, pinned host buffers, weight slabs that rotate.

Device memory of values is allocated and freed on the compute stream only; a copy stream waits for the compute stream
before it writes into new memory, and the executor makes the compute stream wait for every copy that reads a value
before the value is freed. So PyTorch's caching allocator never hands memory out while a copy still uses it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..memory.pages import PinnedMemory, Pool
from .device import Device, DeviceKind, Lane
from .staging import Staging

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


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

    lanes: Mapping[str, _Stream]

    def __init__(self, device: torch.device, pinned_memory: int | None = None):
        self.torch_device = device
        self.lanes = {name: _Stream(device) for name in ("compute", "h2d", "d2h")}
        lock, unlock = functools.partial(_page_lock, device), functools.partial(_page_unlock, device)
        self.pinned = PinnedMemory(pinned_memory, lock, unlock)
        self._staging = Staging(self.pinned, self.lanes["h2d"].record, self.wait_on_host)
        self._pool = Pool(self.pinned, lambda event: event.query())
        self._slabs: list[torch.Tensor] = []

    def reserve_slabs(self, count: int, size: int) -> None:
        if len(self._slabs) == count and (not count or self._slabs[0].numel() >= size):
            return
        self._slabs = []
        compute, h2d = self.lanes["compute"].stream, self.lanes["h2d"].stream
        with torch.cuda.stream(compute):
            self._slabs = [torch.empty(size, dtype=torch.uint8, device=self.torch_device) for _ in range(count)]
        # the memory may have belonged to a value that compute still reads, and deterministic mode fills it on compute
        h2d.wait_stream(compute)

    def running(self) -> AbstractContextManager:
        """What is traced, compiled or made for "cuda" meanwhile is for this GPU, whichever one is the caller's."""
        return torch.cuda.device(self.torch_device)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that is not page-locked goes through the ring: it may be a temporary, which is gone before its copy is done."""
        compute, h2d = self.lanes["compute"].stream, self.lanes["h2d"].stream
        with torch.cuda.stream(compute):
            result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        h2d.wait_stream(compute)  # the memory may have belonged to a value that compute still reads
        if tensor.is_pinned() and tensor.is_contiguous():
            result.copy_(tensor.detach(), non_blocking=True)
            self._pool.reads(tensor, self.lanes["h2d"].record())
        else:
            self._staging.send(tensor, result.view(-1).view(torch.uint8))
        return result

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._pool.empty(tensor.shape, tensor.dtype, "a tensor from the device")
        host.copy_(tensor, non_blocking=True)
        self._pool.reads(host, self.lanes["d2h"].record())
        return host

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        with torch.random.fork_rng([self.torch_device]), torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(seed)
            yield

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


def _page_lock(device: torch.device, address: int, size: int) -> None:
    """Page-lock memory in place, for all GPUs. Raises `RuntimeError` with the reason of the driver.

    The calling thread may have another GPU as its current one, or none yet: the runtime would begin to use that one.
    """
    with torch.cuda.device(device):
        _checked(torch.cuda.cudart().cudaHostRegister(address, size, _FOR_ALL_DEVICES))


def _page_unlock(device: torch.device, address: int) -> None:
    """Called by the garbage collector as well, where an error would be lost: it is a warning."""
    try:
        with torch.cuda.device(device):
            _checked(torch.cuda.cudart().cudaHostUnregister(address))
    except RuntimeError as error:
        if sys.is_finalizing():  # CUDA may have ended before
            return
        warnings.warn(f"memory of the host stays page-locked: {error}", RuntimeWarning, stacklevel=2)


def _checked(result: Any) -> None:
    """Raise for a result that is an error, after CUDA has forgotten it: the next kernel's launch would report it as its own."""
    try:
        torch.cuda.check_error(int(result))
    except RuntimeError:
        _forget_last_error()
        raise


def _forget_last_error() -> None:
    """PyTorch offers no `cudaGetLastError`, but calls it behind each launch of a kernel, and raises what it finds."""
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError:
        pass


def _complaint() -> str | None:
    return (
        None
        if torch.cuda.is_available()
        else "torch.cuda.is_available() is False on this machine. Without the option, layers run on the accelerator if there is one, else on the host"
    )


def _resolve(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _identity(device: torch.device) -> tuple:
    """PyTorch chooses attention kernels by the GPU."""
    return torch.cuda.get_device_name(device), torch.version.cuda


CUDA = DeviceKind(name="cuda", open=CudaDevice, complaint=_complaint, resolve=_resolve, pins_memory=True, identity=_identity)
