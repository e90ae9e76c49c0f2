"""The interface between the executor and a device: four lanes with events, copies, and weight slabs.

A *lane* runs its work in the order in which it receives it. Different lanes run at the same time and synchronize only
through events. The executor decides which lane runs which work and which events a lane waits for. A device implements
lanes, events and copies. Memory of values is allocated and freed in the order of the compute lane alone, so an
allocator that knows one stream is enough.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from l2l_compile.devices.host import cores_beside_a_device, own_memory
from l2l_compile.devices.staging import Staging
from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.stored_entries import pages_around
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import Lane
from l2l_compile.memory.in_place import lock_in_place, locked_bytes
from l2l_compile.memory.layout import aligned
from l2l_compile.memory.pages import Lease, PinnedMemory, Pool, unlocked
from l2l_compile.races import UNWATCHED, Unwatched


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: its properties, known before a device of this kind is opened.

    name        its type for `torch.device`
    open        opens a device, with a budget of page-locked host memory in bytes (None: no bound)
    complaint   the reason why this machine has no such device; None if it has one
    resolve     adds the index to a device that may lack it
    pins_memory whether host memory is page-locked for it
    identity    properties of the device that traces depend on, and that another machine may not have
    """

    name: str
    open: Callable[[torch.device, int | None], Device]
    complaint: Callable[[], str | None]
    resolve: Callable[[torch.device], torch.device]
    pins_memory: bool
    identity: Callable[[torch.device], tuple]


class LaneQueue(ABC):
    """A queue of work of one device."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Run `work` after all work that this lane received before."""

    @abstractmethod
    def record(self) -> Any:
        """An event that happens when all work received so far is done; None if it is done already."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Work that the lane receives from now on starts after `event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the caller until the lane is idle. Raises the error of work that failed."""


class HostWeights(Protocol):
    """Weights of a segment in one buffer of the host, laid out as in a slab (`host/wire.py`).

    buffer   uint8
    pinned   whether the device can copy from it directly
    views    the weights, one by one
    spans    where each of them begins and ends, in bytes
    """

    buffer: torch.Tensor
    pinned: bool
    views: list[torch.Tensor]
    spans: list[tuple[int, int]]

    def in_slab(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The weights as views of another buffer with this layout."""


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A contiguous host tensor to copy into a slab: its offset there in bytes, and whether a device copies from it directly."""

    tensor: torch.Tensor
    start: int
    pinned: bool


class MemoryState(NamedTuple):
    """Bytes of a device: those that this process holds, those that it may still take, and all."""

    held: int
    free: int
    total: int


class LinkRates(NamedTuple):
    """Bytes per second between page-locked memory of the host and the device, each way."""

    h2d: float
    d2h: float


class Kept:
    """Weights that a forward has left in a slab: their step and segment, and the tensors once all lanes are done."""

    def __init__(self, step: object, segment: int):
        self._step, self._segment = weakref.ref(step), segment
        self.tensors: list[torch.Tensor] = []

    def of(self, step: object, segment: int | None = None) -> bool:
        """Whether these weights belong to a step and, if `segment` is given, to that segment."""
        return self._step() is step and segment in (None, self._segment)


class Device(ABC):
    """Lanes, copies and slabs. Copies are called within `LaneQueue.run`, on the lane that their docstring names.

    assertions_are_final  whether a kernel that meets an index out of range ends the process, instead of raising an error
    launches_first        whether a fetch may block the caller; compute then receives its next work before the fetch
    takes_norms           whether the device computes norms of gradients before they cross the link, to save time on the host
    overlaps              whether the device works at the same time as the caller
    profiled              whether its lanes are measured now
    is_host               whether its memory is the host's, so that what it keeps need not be made again there
    keeps_slabs           whether weights may stay in a slab between a forward and its backward
    kept                  the weights that stay, by slab
    slabs                 device memory for weights, uint8
    """

    assertions_are_final = False
    launches_first = False
    takes_norms = False
    overlaps = True
    is_host = False
    profiled = False
    keeps_slabs = True
    kept: dict[int, Kept]
    torch_device: torch.device
    lanes: Mapping[str, LaneQueue]
    pinned: PinnedMemory
    accesses: Unwatched = UNWATCHED
    _pool: Pool
    slabs: list[torch.Tensor]
    _staging: Staging

    @abstractmethod
    def reserve_slabs(self, count: int, size: int) -> None:
        """Have `count` weight slabs of `size` bytes. Called before every step; replaces all slabs unless these exist."""

    def empty_slabs(self) -> None:
        """Free all weights that stay in slabs. Called while no lane works."""
        for kept in self.kept.values():
            self.free(kept.tensors)
        self.kept.clear()

    def set_apart(self, size: int) -> torch.Tensor:
        """Memory for weights that stay from call to call, uint8: a slab of their own (h2d lane)."""
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def send(self, slab: torch.Tensor, wire: HostWeights, start: int, end: int) -> None:
        """Copy bytes of a wire to the same place in a slab (h2d lane)."""
        target = slab[start:end]
        if wire.pinned:
            target.copy_(wire.buffer[start:end], non_blocking=True)
        else:
            self._staging.send(wire.buffer[start:end], target)

    def load_weights(
        self, slab: torch.Tensor, wire: HostWeights | None, weights: Sequence[torch.Tensor], unread: frozenset[int] = frozenset()
    ) -> list[torch.Tensor]:
        """Copy host tensors into a slab, after the bytes of a wire that was sent there (h2d lane).

        Returns contiguous device tensors, which may alias host memory: first the wire's weights, then `weights`. `unread` has
        positions in this order; the entries of these tensors are undefined.
        """
        offset, loaded = 0, []
        if wire is not None:
            offset, loaded = wire.buffer.numel(), wire.in_slab(slab)
        for position, weight in enumerate(weights, len(loaded)):
            part = slab[offset : offset + weight.nbytes]
            if position not in unread:
                self._send_weight(weight, part)
            loaded.append(part.view(weight.dtype).view(weight.shape))
            offset += aligned(part.numel())
        return loaded

    def load_copies(self, slab: torch.Tensor, copies: Sequence[HostCopy], size: int) -> torch.Tensor:
        """Copy host tensors into a slab, each to its offset. Returns the first `size` bytes of the slab, uint8 (h2d lane)."""
        for copy in copies:
            part = slab[copy.start : copy.start + copy.tensor.nbytes]
            if copy.pinned:
                part.copy_(copy.tensor.view(-1).view(torch.uint8), non_blocking=True)
            elif part.numel():
                self._send_weight(copy.tensor, part)
        return slab[:size]

    def lock(self, weights: Sequence[torch.Tensor]) -> None:
        """Page-lock host tensors where they are, within the budget, for copies that follow (h2d lane)."""
        for weight in weights:
            lock_in_place(weight, self.pinned)

    def _send_weight(self, weight: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a host tensor of any strides, which may be on disk, into contiguous device memory, uint8 (h2d lane)."""
        if self.stored_bytes(weight):
            self._staging.send_stored(weight, target)
        else:
            self._staging.send_in_place(weight, target, *locked_bytes(weight))

    def stored_bytes(self, weight: torch.Tensor) -> int:
        """Bytes that a fetch of a host tensor reads from a disk, in whole pages; 0 for one in memory."""
        if range_of(weight) is None or not weight.is_contiguous():
            return 0
        found, first, last, _ = pages_around(weight)
        return found.bytes_to_read(first, last - first)

    @abstractmethod
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous device copy of a host tensor (h2d lane). The result may alias the argument."""

    @abstractmethod
    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a device tensor (d2h lane). The result may alias the argument."""

    def handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """A downloaded tensor as the user gets it, who may keep it for long. Called when all lanes are done."""
        return self._pool.small_in_the_heap(tensor)

    def begin_step(self) -> None:
        """A forward begins, and with it a step that needs host memory anew."""
        self._pool.begin_step()

    def lease(self, size: int, purpose: str) -> Lease:
        """A buffer of host memory in whole pages, from which copies to the device are fast (any thread)."""
        return self._pool.lease(size, purpose)

    def push(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host copies of the gradients of a segment, which nothing else reads, in one buffer of the pool (d2h lane).

        Layers are alike, and so are their buffers: those of one layer are there for the next.
        """
        return self._into_one_buffer(gradients, "the gradients of a segment")

    def download_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `download`, in one buffer: a system maps and page-locks thousands of them, not hundreds of thousands (d2h lane)."""
        return self._into_one_buffer(tensors, "what is kept of a layer")

    def _into_one_buffer(self, tensors: Sequence[torch.Tensor], purpose: str) -> list[torch.Tensor]:
        hosts = self._pool.empty_together(tensors, purpose)
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = self.lanes[Lane.D2H].record()
        if hosts:
            self._pool.reads(max(hosts, key=lambda host: host.nbytes), event)  # one for the buffer; an empty tensor lies in none
        return hosts

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when the last reader of these tensors is done (compute lane)."""

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `free`, called by a finalizer: at any moment, on any thread. Only notes; the tensors are gone right behind it."""

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when a value of the program has been filled with these tensors."""

    def use_workspace(self, size: int) -> None:
        """Called before operations that need up to `size` bytes besides their operands (compute lane)."""

    def wait_on_host(self, event: Any) -> None:
        """Block the calling thread until an event of a lane (not None) has happened."""
        event.wait()

    @abstractmethod
    def start_peak(self) -> None:
        """Start measuring the peak of device memory."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak of device memory in bytes since `start_peak`."""

    def memory(self) -> MemoryState | None:
        """The memory of the device; None for a device without a bound of its own."""
        return None

    def link_rates(self) -> LinkRates | None:
        """How fast the link is, measured at the first call; None for a device without one. Called while no lane works."""
        return None

    def host_memory_available(self) -> int:
        """Bytes of the host's memory that values of the device may still take."""
        return self._free_host_memory()

    def _free_host_memory(self) -> int:
        """Bytes of the host's memory that this process may still take."""
        return own_memory()

    def now(self) -> float:
        """Seconds on the caller's clock."""
        return time.perf_counter()

    def begins(self, node: fx.Node, segments: Sequence[Segment]) -> None:
        """Work that lanes receive from now on belongs to this node of a program with these segments."""

    def begins_micro_batch(self, number: int) -> None:
        """The lane computes this micro-batch of the segment from now on, counted from 0 (compute lane)."""

    def unlocked_pool(self) -> Pool:
        """Buffers of host memory that is not page-locked."""
        return Pool(unlocked())

    def running(self) -> AbstractContextManager:
        """Context manager in which the caller lowers blocks and submits work to the lanes."""
        return nullcontext()

    def updating(self) -> AbstractContextManager:
        """Context manager in which a thread of the host, which submits nothing, updates what lanes have brought."""
        return nullcontext()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Context manager in which the default generator of this device alone starts at `seed`. Its state is restored at the end.

        The threads of a process have one default generator, so one thread at a time is in this context.
        """
        with DRAWING, torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield

    def generator(self, seed: int) -> torch.Generator:
        """A new generator of the device."""
        return torch.Generator(self.torch_device).manual_seed(seed)

    def host_threads(self) -> int:
        """How many threads the host's own work may take beside the device."""
        return cores_beside_a_device()

    def recover(self) -> None:
        """After a failure: wait until no lane works, discard the errors of lanes, free all slabs.

        An interrupt of a wait is raised when all is done.
        """
        interrupts = [error for lane in self.lanes.values() if (error := _settle(lane)) is not None]
        self.reserve_slabs(0, 0)
        if interrupts:
            raise interrupts[0]

    def await_ranks(self, check: Callable[[], None]) -> None:
        """Wait for lanes whose work waits for other ranks. `check`, called meanwhile, raises if a rank will not come.

        Lanes whose collectives are polled on the host have called it themselves.
        """

    def synchronize(self) -> None:
        """Wait for all lanes. Raises the error of work that failed."""
        for lane in self.lanes.values():
            lane.synchronize()


def _settle(lane: LaneQueue) -> BaseException | None:
    """Wait until a lane is idle, and discard the error of its work. Returns what has interrupted the wait."""
    interrupt = None
    for _ in range(_WAITS):
        try:
            lane.synchronize()
            break
        except Exception:  # noqa: BLE001 - of the lane, which is idle then, or of a signal handler: then the next wait finds out
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            interrupt = error
    return interrupt


DRAWING = threading.RLock()  # held by the thread whose operations draw from a default generator
_WAITS = 8  # a device that is broken raises its error in every wait
