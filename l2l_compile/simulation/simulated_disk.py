"""A disk in virtual time: the ring of chunks through which updates pass parameters and optimizer state, and the optimizer's steps on them.

    chunk:  read ahead into a buffer (lane disk_read) -> update on the host thread -> written (lane disk_write) -> the buffer is free

Reads wait for a free buffer, for the reads before, and for the write of the same chunk in the step before; so `disk/chunk_ring.py` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from l2l_compile.errors import OptionError
from l2l_compile.host.disk_plan import BUFFERS, DiskPlan, disk_plan
from l2l_compile.host.step.torch_step import Hyperparameters, TorchStep
from l2l_compile.host.stored_copies import StoredCopies
from l2l_compile.host.stored_parameters import DiskFigures
from l2l_compile.host.wire import Wires
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import Clock, Clocks, SimulatedEvent, put_on_disk
from l2l_compile.simulation.simulated_host import OnePass

Parameter = torch.nn.Parameter
_Result = TypeVar("_Result")
_OF_THE_HOST = 0.8  # of a machine's memory, where the option host_memory says nothing: as of what a system has available


def on_disk_of(options: Options, machine: Machine) -> Options:
    """The options with the budget of `host_memory` that a machine gives. Raises `OptionError` if the machine has no disk."""
    if options.disk is None:
        return options
    for figure in ("disk_read", "disk_write"):
        machine.known(figure)
    return (
        options
        if options.host_memory is not None or not options.stores_parameters
        else replace(options, host_memory=budget_of(machine))
    )


def budget_of(machine: Machine) -> int:
    """The bytes of `host_memory` on a machine, where the option says nothing."""
    return int(_OF_THE_HOST * machine.host_room)


class DiskRing:
    """The buffers of the disk, `count` of `size` bytes each. Times of all reads and writes follow from those of the chunks before."""

    def __init__(self, clocks: Clocks, size: int, count: int = BUFFERS, fetched: float = 0.0):
        """`fetched` are the bytes that fetches read of copies for each byte that updates read: the disk does this first."""
        self._clocks, self.size, self._count = clocks, size, count
        self._read_rate, self._write_rate, self._fetched = clocks.disk_rate("disk_read"), clocks.disk_rate("disk_write"), fetched
        self._reading, self._writing = Clock(Lane.DISK_READ), Clock(Lane.DISK_WRITE)
        self._free = deque([0.0] * count)  # when each buffer is free
        self._ahead: deque[tuple[int, SimulatedEvent]] = deque()  # chunks that are read ahead, by their bytes
        self._upcoming: deque[int] = deque()
        self._taken: list[int] = []
        self._written: list[float] = []  # when each chunk of this step was written, and in `_last` of the step before
        self._last: list[float] = []
        self.read = self.written = 0
        self.waited = 0.0

    def begin(self) -> None:
        """The updates of a step begin: chunks are read ahead in the order of the step before."""
        self._drop()
        self._upcoming, self._taken = deque(self._taken), []
        self._last, self._written = self._written, []
        self._read_ahead()

    def finish(self) -> None:
        """The thread waits until everything is written."""
        self._drop()
        self._clocks.thread.wait(self._writing.event())

    def update(self, size: int, seconds: float) -> None:
        """An update of a chunk with `size` bytes on disk takes `seconds` of the running thread."""
        thread = self._clocks.thread
        if self._ahead and self._ahead[0][0] == size:
            _, ready = self._ahead.popleft()
        else:
            self._drop()
            ready = self._begin_to_read(size, max(thread.now, self._free.popleft()))
        self.waited += max(0.0, ready.time - thread.now)
        self._taken.append(size)
        thread.wait(ready)
        self._clocks.spend(seconds)
        self._writing.now = self._clocks.without_stolen_time(Lane.DISK_WRITE, self._writing.now)
        start = max(thread.now, self._writing.now)
        self._clocks.work_on(self._writing, start, size / self._write_rate)
        self._written.append(self._writing.now)
        self.written += size
        self._free.append(self._writing.now)
        self._read_ahead()

    def whole(self, size: int, copies: int, step: Callable[[], _Result]) -> _Result:
        """The result of a step on tensors that are read before it and written behind it, and then with their copies."""
        thread = self._clocks.thread
        if size:
            thread.wait(self._begin_to_read(size, thread.now))
        result = step()
        if written := size + copies:
            self._clocks.work_on(self._writing, max(thread.now, self._writing.now), written / self._write_rate)
            self.written += written
            thread.wait(self._writing.event())
        return result

    def _read_ahead(self) -> None:
        """One buffer is left for a chunk that comes out of order."""
        while self._upcoming and len(self._free) > 1:
            number = len(self._taken) + len(self._ahead)
            before = self._last[number] if number < len(self._last) else 0.0
            size = self._upcoming.popleft()
            start = max(self._clocks.thread.now, self._free.popleft(), before)
            self._ahead.append((size, self._begin_to_read(size, start)))

    def _begin_to_read(self, size: int, start: float) -> SimulatedEvent:
        self._reading.now = self._clocks.without_stolen_time(Lane.DISK_READ, self._reading.now)
        self._clocks.work_on(self._reading, max(start, self._reading.now), size / self._read_rate)
        self._reading.now += self._fetched * size / self._read_rate  # the disk is at work for fetches, whose lane counts it
        self.read += size
        return self._reading.event()

    def _drop(self) -> None:
        """What is read ahead comes in another order: its buffers are free when it has been read."""
        self._free.extend(event.time for _, event in self._ahead)
        self._ahead.clear()
        self._upcoming.clear()
        self._free = deque(sorted(self._free))


def chunks(tensors: Iterable[tuple[int, float]], size: int) -> Iterator[tuple[int, float]]:
    """Bytes on disk and seconds of an update of each chunk of at most `size` bytes, for the parameters of a segment.

    `tensors` has both for each parameter.
    """
    bytes_of_chunk, seconds_of_chunk = 0, 0.0
    for on_disk, seconds in tensors:
        left = on_disk
        while left:
            part = min(left, size - bytes_of_chunk)
            bytes_of_chunk, seconds_of_chunk, left = (
                bytes_of_chunk + part,
                seconds_of_chunk + seconds * part / on_disk,
                left - part,
            )
            if bytes_of_chunk == size:
                yield bytes_of_chunk, seconds_of_chunk
                bytes_of_chunk, seconds_of_chunk = 0, 0.0
    if bytes_of_chunk:
        yield bytes_of_chunk, seconds_of_chunk


class SimulatedStore:
    """As `StoredParameters`, for a simulated loop: what is on disk by the plan, and no file."""

    run = None

    def __init__(self, clocks: Clocks, options: Options):
        self._clocks, self._options = clocks, options
        self.largest_segment = self.stash_buffers = 0
        self.plan: DiskPlan | None = None
        self._bytes: dict[Parameter, int] = {}
        self._copies: dict[Parameter, int] = {}
        self._ring: DiskRing | None = None
        self._before, self._last = DiskFigures(), DiskFigures()

    @property
    def ring(self) -> DiskRing:
        assert self._ring is not None, "a forward comes before the first update"
        return self._ring

    @property
    def late(self) -> frozenset[Parameter]:
        """As `StoredParameters.late`."""
        return self.plan.late if self.plan is not None else frozenset()

    def misplaced(self, parameters: Iterable[Parameter]) -> Sequence[Parameter]:
        """Decide, in the first forward. Raises `L2LError` if the budget is too small, `OptionError` for weights that are read in forward."""
        if self.plan is None:
            self.plan = plan = disk_plan(self._options, self.largest_segment, self.stash_buffers)
            plan.check()
            check_is_timed(plan, self._options, self._clocks.machine)
            self._ring = DiskRing(self._clocks, plan.buffer, fetched=fetched_beside_updates(plan, self._options))
            self._bytes, self._copies = bytes_on_disk(plan)
            for parameter, is_there in zip(plan.parameters, plan.placement.masters, strict=True):
                if is_there:
                    put_on_disk(parameter)
        return ()

    def on_disk(self, parameter: Parameter) -> int:
        """Bytes of a parameter and its state that are on disk."""
        return self._bytes.get(parameter, 0)

    def copies_on_disk(self, parameter: torch.Tensor) -> int:
        """Bytes of its copy for the link that are on disk."""
        return self._copies.get(parameter, 0)  # type: ignore[call-overload]  # a tensor that is none of the parameters

    def begin_updates(self) -> None:
        now = self._moved()
        self._before, self._last = now, now.since(self._before)
        self.ring.begin()

    def figures(self) -> DiskFigures:
        return self._last

    def finish_writes(self) -> None:
        if self._ring is not None:
            self._ring.finish()

    def forget(self) -> None:
        """Nothing is dropped in virtual time: no step fails."""

    def being_written(self, parameters: Iterable[Parameter]) -> Sequence[Parameter]:
        return ()

    def _moved(self) -> DiskFigures:
        return DiskFigures(self.ring.read, self.ring.written, self.ring.waited)


class SimulatedCopies(StoredCopies):
    """As `StoredCopies`: they have sizes, and no file."""

    def __init__(self, store: SimulatedStore, wires: Wires):
        super().__init__(
            lambda shape, dtype: put_on_disk(torch.empty(shape, dtype=dtype)), wires, lambda p: bool(store.copies_on_disk(p))
        )

    def load(self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        copies = [self._copy_of(parameter, dtype) for parameter, dtype in zip(parameters, dtypes, strict=True)]
        for copy in copies:
            copy.generation = self._wires.generation
        return [copy.view for copy in copies]


def bytes_on_disk(plan: DiskPlan) -> tuple[dict[Parameter, int], dict[Parameter, int]]:
    """Bytes of each parameter and of its optimizer state that are on disk, and of its copy for the link."""
    placed = plan.placement
    rows = list(zip(plan.parameters, plan.sizes, placed.masters, placed.states, placed.copies, strict=True))
    own = {p: size.master * master + size.state * state for p, size, master, state, _ in rows}
    return own, {p: size.copy * copy for p, size, _, _, copy in rows}


def fetched_beside_updates(plan: DiskPlan, options: Options) -> float:
    """Bytes that fetches read from the disk while updates run, for each byte that these read: of one of a step's two passes."""
    fetched = plan.masters if options.precision == "fp32" and not options.delay else plan.copies
    return fetched / max(1, plan.placement.on_disk)


def check_is_timed(plan: DiskPlan, options: Options, machine: Machine) -> None:
    """Raise `OptionError` for weights that the operations of a host read from the file, through the page cache, and for turns in flight."""
    if options.goes_by_turns and options.delay:
        raise OptionError(
            "the disk is not timed in a schedule without a flush, whose updates begin within the next step: leave out 'disk', 'delay' or 'schedule'"
        )
    fetched = plan.masters if options.precision == "fp32" and not options.delay else plan.copies
    if fetched and not machine.overlaps:
        raise OptionError(
            "weights that are on disk are read by the operations of this machine's processor through the page cache, whose time is not known to "
            "a simulation: take a machine with an accelerator, or a larger host_memory"
        )


class OnePassThroughDisk(OnePass):
    """As `OnePass`, with parameters and state that are on disk."""

    def __init__(self, one: OnePass, store: SimulatedStore):
        super().__init__(one._clocks, one._wires, one._state_bytes)
        self._store = store

    def _spend(self, moved: Mapping[Parameter, int]) -> None:
        rate = self._clocks.machine.host_bandwidth
        on_disk = {p: self._store.on_disk(p) + self._store.copies_on_disk(p) for p in moved}
        self._clocks.spend(sum(size for parameter, size in moved.items() if not on_disk[parameter]) / rate)
        through = ((on_disk[parameter], size / rate) for parameter, size in moved.items())
        for size, seconds in chunks(through, self._store.ring.size):
            self._store.ring.update(size, seconds)


class WholeThroughDisk:
    """The optimizer's own step: takes the parameters of a segment whole, and waits for the disk before it and behind it."""

    def __init__(self, step: TorchStep, store: SimulatedStore):
        self._step, self._store = step, store

    def on(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        store = self._store
        read, copies = sum(map(store.on_disk, gradients)), sum(map(store.copies_on_disk, gradients))
        return store.ring.whole(read, copies, lambda: self._step.on(shared, gradients, factor))


def through_disk(step: OnePass | TorchStep, store: SimulatedStore) -> OnePassThroughDisk | WholeThroughDisk:
    """The step of a simulated loop, with a disk."""
    return OnePassThroughDisk(step, store) if isinstance(step, OnePass) else WholeThroughDisk(step, store)
