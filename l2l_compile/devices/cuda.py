"""An NVIDIA GPU: each lane is a stream; memory comes from PyTorch's caching allocator."""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from l2l_compile.devices.accelerator import Accelerator
from l2l_compile.devices.device import DRAWING, DeviceKind, LaneQueue, MemoryState
from l2l_compile.lanes import OF_DEVICE, Lane
from l2l_compile.memory.pages import PinnedMemory, Pool

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_LOOK = 1e-4  # seconds between two looks at a stream that may wait for other ranks


@functools.cache
def _streams(device: torch.device) -> Mapping[str, torch.cuda.Stream]:
    """The streams of a GPU's lanes, which all sessions of the process share.

    cuBLAS keeps a workspace for each stream that has run a product, and the caching allocator keeps free memory for each stream.
    """
    return {name: torch.cuda.Stream(device) for name in OF_DEVICE}


class _Stream(LaneQueue):
    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> torch.cuda.Event:
        """An event for which a thread waits asleep: by default, it would keep a core busy until the event has happened."""
        return self.stream.record_event(torch.cuda.Event(blocking=True))

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
        if _is_rank_without_choice():
            torch.cuda.set_device(device)  # PyTorch's optimizers look at the current GPU: each rank would take memory of GPU 0
        self._process = os.getpid()
        lock, unlock = functools.partial(_page_lock, device), functools.partial(_page_unlock, device, self._process)
        pinned = PinnedMemory(pinned_memory, lock, unlock)
        lanes = {name: _Stream(stream) for name, stream in _streams(device).items()}
        super().__init__(lanes, pinned, Pool(pinned, self._has_happened))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self.lanes[Lane.COMPUTE].stream):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def running(self) -> AbstractContextManager:
        """This GPU is the current one, so traces, compiled code and tensors for "cuda" are for it, not for the caller's GPU."""
        return torch.cuda.device(self.torch_device)

    def updating(self) -> AbstractContextManager:
        """As `running`: PyTorch's optimizers look at the current GPU, even of parameters on the host. A forked process has none."""
        return torch.cuda.device(self.torch_device) if os.getpid() == self._process else nullcontext()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        with DRAWING, torch.random.fork_rng([self.torch_device]), torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(seed)
            yield

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        """The device is set first, as in `_page_lock`: the thread that updates has chosen none."""
        with torch.cuda.device(self.torch_device):
            event.synchronize()

    def _has_happened(self, event: torch.cuda.Event) -> bool:
        with torch.cuda.device(self.torch_device):
            return event.query()

    def await_ranks(self, check: Callable[[], None]) -> None:
        """A thread that waited in the driver for a collective of NCCL would not notice that a rank has failed."""
        for stream in _streams(self.torch_device).values():
            event = stream.record_event()
            while not event.query():
                check()
                time.sleep(_LOOK)

    def memory(self) -> MemoryState:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved, allocated = torch.cuda.memory_reserved(self.torch_device), torch.cuda.memory_allocated(self.torch_device)
        return MemoryState(allocated, free + reserved - allocated, total)

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


def _page_unlock(device: torch.device, process: int, address: int) -> None:
    """Undo `_page_lock`, which this process called. An error becomes a warning: the garbage collector would lose an exception.

    In a process that was forked since, nothing is page-locked, and CUDA cannot be used.
    """
    if os.getpid() != process:
        return
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
    """The GPU of a device without an index: the current one, which `torch.cuda.set_device` chooses.

    A rank that has chosen none takes the GPU of its number on this host, which torchrun gives it: each rank needs a GPU of its own.
    """
    if device.index is not None:
        return device
    if _is_rank_without_choice():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _is_rank_without_choice() -> bool:
    """Whether this process is a rank that has chosen no GPU by `torch.cuda.set_device`."""
    return dist.is_available() and dist.is_initialized() and torch.cuda.current_device() == 0


def _identity(device: torch.device) -> tuple:
    """All on which PyTorch's choice of attention kernels depends: the GPU, the libraries, the order of preference."""
    return (
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.version.cuda,
        torch.backends.cudnn.version(), *torch._C._get_sdp_priority_order(),
    )  # fmt: skip


CUDA = DeviceKind(name="cuda", open=CudaDevice, complaint=_complaint, resolve=_resolve, pins_memory=True, identity=_identity)
