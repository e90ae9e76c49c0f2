"""A device whose clock is simulated: the executor, the programs, slabs, waits and releases are the real ones, the time is not.

Tensors are fake: they have sizes and no memory. Lanes and threads have clocks. A piece of work of a lane begins when the lane has
done all earlier work, when the events that it waits for have happened, and when the thread that gives the work has reached this
point. All three are known when the lane receives the work. So times are computed at that moment, and no queue is simulated.

Memory of the device is marked, and results computed from marked memory are marked as well. The marks tell whether an operation
runs on the device or on the host.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from l2l_compile.devices.accelerator import Accelerator
from l2l_compile.devices.counted import Counted
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.devices.device import LaneQueue, MemoryState
from l2l_compile.devices.host import HOST
from l2l_compile.devices.labels import label_of, label_of_micro_batch
from l2l_compile.devices.ledger import Ledger
from l2l_compile.devices.staging import Staging
from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import OF_DEVICE, Lane
from l2l_compile.memory.address import memory_of_storage
from l2l_compile.memory.pages import Lease, PinnedMemory, Pool, _Buffer
from l2l_compile.simulation.machine import Machine
from l2l_compile.timeline import Span, Timeline


@dataclass(frozen=True)
class SimulatedEvent:
    """The time when all work of a lane or a thread so far is done, and the label of the last span."""

    time: float
    label: str


class Clock:
    """The time at which a lane or a thread can begin new work, and the label of its last wait since its last piece of work."""

    def __init__(self, name: str):
        self.name, self.now, self.waited_for, self.label = name, 0.0, "", ""

    def wait(self, event: SimulatedEvent) -> None:
        """No new work begins before the event."""
        if event.time > self.now:
            self.now, self.waited_for = event.time, event.label

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self.now, self.label)


class Clocks:
    """The clocks of a machine, and the work that has run on them.

    thread  the clock of the thread whose code runs: the caller, or the thread that updates
    lane    the clock of the lane that receives work now, None outside of a lane
    disks   over which a store is striped: their rates add up
    disk_fetches  when they have read the weights that fetches have asked for
    label   of the work that the caller does now
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.lanes = {name: Clock(name) for name in OF_DEVICE}
        self.thread = self.caller = Clock(Lane.CALLER)
        self.lane: Clock | None = None
        self.disks = 1
        self.disk_fetches = Clock(Lane.DISK_READ)
        self.label = ""
        self._stolen: dict[str, list[tuple[float, float]]] = {}
        self._spans: list[list] = []  # as in `Span`; the last one of each clock may still grow
        self._last: dict[str, list] = {}

    def spend(self, seconds: float, label: str = "") -> None:
        """The running thread works for `seconds`."""
        self._note(self.thread, self.thread.now, seconds, label or self.label, self.thread.waited_for)

    def steal_from_updates(self, lane: str, start: float, seconds: float) -> None:
        """A disk does other work from `start` on for so long, which comes before that of updates."""
        self._stolen.setdefault(lane, []).append((start, seconds))

    def without_stolen_time(self, lane: str, now: float) -> float:
        """When a disk can go on with updates, which has done those before at `now`, behind its other work since the last call."""
        for start, seconds in self._stolen.pop(lane, ()):
            now = max(now, start) + seconds
        return now

    def queue(self, seconds: float, launches: int = 1) -> None:
        """The thread gives the lane work of `seconds`. If the host is the device, the thread does this work itself."""
        assert self.lane is not None, "device memory is touched outside of a lane"
        if not self.machine.overlaps:
            self.spend(launches * self.machine.launch + seconds)
            return
        self.spend(launches * self.machine.launch)
        thread, lane = self.thread, self.lane
        by_thread = thread.now > lane.now
        waited_for = f"{thread.name}: {thread.waited_for or self.label}" if by_thread else lane.waited_for
        self._note(lane, max(thread.now, lane.now), seconds, self.label, waited_for)

    def work_on(self, clock: Clock, start: float, seconds: float) -> None:
        """A clock beside the lanes works for `seconds` from `start` on, when it has done its earlier work."""
        self._note(clock, start, seconds, self.label, self.thread.name if start > clock.now else "")

    def copy(self, size: int, bandwidth: float, asynchronous: bool) -> None:
        """The lane copies bytes over the link; unless `asynchronous`, the thread waits for the copy."""
        if not asynchronous:
            bandwidth = self.machine.pageable
        self.queue(self.machine.latency + size / bandwidth)
        if not asynchronous and self.lane is not None:
            self.thread.wait(self.lane.event())

    def copy_from_disk(self, size: int, slot: int, slots: int, asynchronous: bool = True) -> None:
        """The lane copies bytes that a disk reads into slots, each used again when it was copied: `Staging.send_stored` in virtual time."""
        reading: deque[tuple[int, SimulatedEvent]] = deque()

        def take() -> None:
            part, ready = reading.popleft()
            self.thread.wait(ready)
            self.copy(part, self.machine.h2d, asynchronous)
            assert self.lane is not None
            self.thread.wait(self.lane.event())  # the next read is into this slot

        rate = self.disk_rate("disk_read")
        for start in range(0, size, slot):
            if len(reading) == slots:
                take()
            part = min(slot, size - start)
            self.work_on(self.disk_fetches, max(self.thread.now, self.disk_fetches.now), part / rate)
            reading.append((part, self.disk_fetches.event()))
        while reading:
            take()

    def disk_rate(self, figure: str) -> float:
        """Bytes a second of all disks together, "disk_read" or "disk_write". Raises `OptionError` for a machine without this figure."""
        return self.disks * self.machine.known(figure)

    def arrive(self, start: float, seconds: float, waited_for: str) -> None:
        """A message came to the lane from another rank, begun at a time that may be before the thread asked whether it is there."""
        assert self.lane is not None, "messages come to lanes"
        lane = self.lane
        begin, end = max(start, lane.now), start + seconds  # the lane did other work meanwhile, if the host is the device
        if begin < end:
            self._note(lane, begin, end - begin, self.label, waited_for)
        else:
            lane.wait(SimulatedEvent(end, waited_for))

    def given(self) -> SimulatedEvent:
        """What the current thread gives to another thread now."""
        return SimulatedEvent(self.thread.now, f"{self.thread.name}: {self.label}")

    @contextmanager
    def on_thread(self, clock: Clock, given: SimulatedEvent | None = None) -> Iterator[None]:
        """Context manager whose work another thread does after all its earlier work. The current thread gives it now, or has given it before."""
        before, label = (self.thread, self.lane), self.label
        clock.wait(given or self.given())
        self.thread, self.lane = clock, None
        try:
            yield
        finally:
            (self.thread, self.lane), self.label = before, label

    def timeline(self, start: float, end: float) -> Timeline:
        """The work that ran between two times."""
        return Timeline(0.0, end, tuple(Span(*span) for span in self._spans)).between(start, end)

    def _note(self, clock: Clock, start: float, seconds: float, label: str, waited_for: str) -> None:
        end, last = start + seconds, self._last.get(clock.name)
        if last is not None and last[1] == label and last[3] == start:
            last[3] = end
        elif seconds > 0:
            self._last[clock.name] = span = [clock.name, label, start, end, waited_for if last and start > last[3] else ""]
            self._spans.append(span)
        clock.now, clock.label = end, label
        if seconds > 0:
            clock.waited_for = ""


class SimulatedLane(LaneQueue):
    """Runs work immediately. The work adds its duration to the lane's clock."""

    def __init__(self, clocks: Clocks, name: Lane):
        self._clocks, self._clock = clocks, clocks.lanes[name] if clocks.machine.overlaps else clocks.caller

    def run(self, work: Callable[[], None]) -> None:
        before, label, self._clocks.lane = self._clocks.lane, self._clocks.label, self._clock
        try:
            work()
        finally:
            self._clocks.lane, self._clocks.label = before, label

    def record(self) -> SimulatedEvent:
        return self._clock.event()

    def wait(self, event: SimulatedEvent) -> None:
        self._clock.wait(event)

    def synchronize(self) -> None:
        self._clocks.thread.wait(self._clock.event())


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Mark this memory as the device's."""
    tensor.untyped_storage().on_device = True  # type: ignore[attr-defined]  # an attribute of this file; storages keep it
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether memory is the device's."""
    return getattr(tensor.untyped_storage(), "on_device", False)


def put_on_disk(tensor: torch.Tensor) -> torch.Tensor:
    """Mark this memory as one on disk."""
    tensor.untyped_storage().on_disk = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether memory is the host's, and page-locked."""
    storage = tensor.untyped_storage()
    lease = getattr(storage, "lease", None)
    return getattr(lease.buffer.memory.untyped_storage() if lease is not None else storage, "pinned", False)


class SimulatedMemory(PinnedMemory):
    """Host memory that is counted but does not exist. `taken` counts all bytes, `locked` the page-locked bytes."""

    def __init__(self, budget: int | None, taken: Ledger, locked: Ledger):
        super().__init__(budget, lambda address, size: None, lambda address: None)
        self._taken, self._locked = taken, locked

    def take(self, size: int, purpose: str) -> tuple[torch.Tensor, bool]:
        buffer = torch.empty(max(size, 1), dtype=torch.uint8)[:size]
        pinned = self.has_room(size)
        buffer.untyped_storage().pinned = pinned  # type: ignore[attr-defined]
        for ledger in (self._taken, self._locked)[: 1 + pinned]:
            ledger.take(size)
            weakref.finalize(buffer.untyped_storage(), ledger.give, size)
        if pinned:
            self._used += size
            weakref.finalize(buffer.untyped_storage(), self._given_back.append, size)
        return buffer, pinned

    def lock_in_place(self, storage: torch.UntypedStorage, address: int, size: int) -> None:
        super().lock_in_place(storage, address, size)
        storage.pinned = True  # type: ignore[attr-defined]
        self._locked.take(size)

    def unlock_in_place(self, address: int, size: int) -> None:
        super().unlock_in_place(address, size)
        self._locked.give(size)


class _SimulatedLease:
    """A buffer in use: the storages of its fake tensors keep the lease alive."""

    buffer: _Buffer

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own."""
        made = torch.empty(shape, dtype=dtype)
        made.untyped_storage().lease = self  # type: ignore[attr-defined]
        return made


class SimulatedPool(Pool):
    """A pool without memory. It reuses the same buffers at the same moments as the real pool."""

    def _lease(self, buffer: _Buffer, size: int) -> Lease:
        lease = _SimulatedLease()
        self._note(lease, buffer, size)
        return lease  # type: ignore[return-value]  # the same interface

    def _buffer_of(self, tensor: torch.Tensor) -> _Buffer | None:
        lease = getattr(tensor.untyped_storage(), "lease", None)
        return lease.buffer if lease is not None else None


class _InVirtualTime(Counted):
    """The part of a simulated device that does not depend on where its memory is. To be opened, and used, in a fake mode.

    clocks  of lanes and threads, with the work that has run
    node    the label of the node whose work lanes receive
    occupied  bytes of host memory that the model and its optimizer have
    taken, locked  bytes of host memory that were taken for wires, buffers and gradients; the page-locked part of them
    """

    machine: Machine
    clocks: Clocks
    node: str = ""
    occupied: int = 0
    ledger: Ledger
    taken: Ledger
    locked: Ledger

    @abstractmethod
    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """New memory for a result of a block."""

    def unlocked_pool(self) -> Pool:
        return SimulatedPool(SimulatedMemory(0, self.taken, self.locked))

    def wait_on_host(self, event: SimulatedEvent) -> None:
        self.clocks.thread.wait(event)

    def _free_host_memory(self) -> int:
        return max(0, self.machine.host_room - self.occupied - self.taken.all_held)

    def now(self) -> float:
        return self.clocks.caller.now

    def begins(self, node: fx.Node, segments: Sequence[Segment]) -> None:
        self.node = self.clocks.label = label_of(node, segments)
        self.clocks.spend(self.machine.node)

    def begins_micro_batch(self, number: int) -> None:
        self.clocks.label = label_of_micro_batch(self.node, number)
        self.clocks.spend(self.machine.micro_batch)

    def host_threads(self) -> int:
        return 1


class SimulatedStaging(Staging):
    """A ring that copies part by part like the real one, without an operation on fake tensors for each part."""

    clocks: Clocks

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        entries, ring, machine = source.detach().reshape(-1), self._slots[0].numel(), self.clocks.machine
        total, most = target.numel(), ring // entries.element_size() * entries.element_size()
        for start in range(0, total, most):
            size = min(most, total - start)
            slot, _ = self._place(size)
            self.clocks.spend(2 * size / machine.host_bandwidth)
            self.clocks.copy(size, machine.h2d, asynchronous=is_pinned(self._slots[slot]))

    def send_stored(self, source: torch.Tensor, target: torch.Tensor) -> None:
        slot = self._slots[0]
        self.clocks.copy_from_disk(whole_pages(target.numel()), slot.numel(), len(self._slots), is_pinned(slot))


class SimulatedDevice(_InVirtualTime, Accelerator):
    """The accelerator of a machine."""

    def __init__(self, machine: Machine, pinned_memory: int | None = None):
        self.torch_device, self.machine, self.clocks = HOST, machine, Clocks(machine)
        self.ledger, self.taken, self.locked = (Ledger(memory_of_storage) for _ in range(3))
        pinned, thread = SimulatedMemory(pinned_memory, self.taken, self.locked), self.clocks
        pool = SimulatedPool(pinned, lambda event: event.time <= thread.thread.now)
        super().__init__({name: SimulatedLane(self.clocks, name) for name in OF_DEVICE}, pinned, pool)

    def _new_staging(self) -> Staging:
        staging = SimulatedStaging(self.pinned, self.lanes[Lane.H2D].record, self.wait_on_host)
        staging.clocks = self.clocks
        return staging

    def reserve_slabs(self, count: int, size: int) -> None:
        before = self.slabs
        super().reserve_slabs(count, size)
        if self.slabs is not before:
            self.ledger.reserve(self.slabs)

    def memory(self) -> MemoryState:
        held = self.ledger.all_held
        return MemoryState(held, self.machine.device_room - held, int(self.machine.device_memory))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return mark(torch.empty(shape, dtype=dtype))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return is_pinned(tensor)

    def stored_bytes(self, weight: torch.Tensor) -> int:
        return whole_pages(weight.nbytes) if getattr(weight.untyped_storage(), "on_disk", False) else 0


class SimulatedHost(_InVirtualTime, CpuDevice):
    """A machine whose host is the device: one thread does everything but updates, and nothing is copied."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.clocks = machine, Clocks(machine)
        self.ledger, self.taken, self.locked = (Ledger(memory_of_storage) for _ in range(3))
        self.lanes = {name: SimulatedLane(self.clocks, name) for name in OF_DEVICE}
        self.pinned = SimulatedMemory(0, self.taken, self.locked)
        self._pool = SimulatedPool(self.pinned)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


def open_simulated(machine: Machine, pinned_memory: int | None) -> SimulatedDevice | SimulatedHost:
    """The device of a machine, with a budget of page-locked host memory in bytes (None: no bound)."""
    return SimulatedDevice(machine, pinned_memory) if machine.overlaps else SimulatedHost(machine)
