"""An NVIDIA GPU: each lane is a stream; memory comes from PyTorch's caching allocator."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..memory.pages import PinnedMemory, Pool
from .accelerator import Accelerator
from .device import LANES, DeviceKind, Lane

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


class CudaDevice(Accelerator):
    """Streams a program through a GPU. `peak_bytes` is the caching allocator's peak of allocated bytes."""

    assertions_are_final = True
    lanes: Mapping[str, _Stream]

    def __init__(self, device: torch.device, pinned_memory: int | None = None):
        self.torch_device = device
        lock, unlock = functools.partial(_page_lock, device), functools.partial(_page_unlock, device)
        pinned = PinnedMemory(pinned_memory, lock, unlock)
        lanes = {name: _Stream(device) for name in LANES}
        super().__init__(lanes, pinned, Pool(pinned, lambda event: event.query()))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self.lanes["compute"].stream):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def running(self) -> AbstractContextManager:
        """This GPU is the current one, so traces, compiled code and tensors for "cuda" are for it, not for the caller's GPU."""
        return torch.cuda.device(self.torch_device)

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

    The device is set first. The calling thread may have another current GPU, or none yet, and the CUDA runtime would
    begin to use that one.
    """
    with torch.cuda.device(device):
        _checked(torch.cuda.cudart().cudaHostRegister(address, size, _FOR_ALL_DEVICES))


def _page_unlock(device: torch.device, address: int) -> None:
    """Undo `_page_lock`. An error becomes a warning: the garbage collector may call this, and would lose an exception."""
    try:
        with torch.cuda.device(device):
            _checked(torch.cuda.cudart().cudaHostUnregister(address))
    except RuntimeError as error:
        if sys.is_finalizing():  # CUDA may have ended before
            return
        warnings.warn(f"memory of the host stays page-locked: {error}", RuntimeWarning, stacklevel=2)


def _checked(result: Any) -> None:
    """Raise `RuntimeError` for an error code. Clears CUDA's last error first: the next launch would report it as its own."""
    try:
        torch.cuda.check_error(int(result))
    except RuntimeError:
        _forget_last_error()
        raise


def _forget_last_error() -> None:
    """Launch a kernel: PyTorch offers no `cudaGetLastError`, but calls it after each launch, and raises its error."""
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
