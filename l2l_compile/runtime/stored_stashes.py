"""Stashes on disk (`stash="disk"`): written behind forward, read ahead of backward, each by a thread in the order of the program.

    lane       caller             disk_write              caller             disk_read              caller
    node       store(%h)     ->   write, free %h     ...  load(%s)      ->   read into memory  ->   restore

The caller waits in `store` while more is being written than memory is for, and in `restore` until what it reads is there. So a slow
disk makes a step slow, and takes no more memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import fx

from l2l_compile.devices.device import Device
from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.disk_threads import Transfer
from l2l_compile.disk.stash_store import BUFFER_BYTES, StashExtent, StashStore, StoredTensor
from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.program import DISK_AHEAD, LEAST_ON_DISK
from l2l_compile.ir.values import Bindings
from l2l_compile.lanes import Lane
from l2l_compile.memory.address import address
from l2l_compile.races import Unwatched
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.stats import Stats


class DiskTicket(Protocol):
    """A piece of work of a worker (`host/worker.py`)."""

    def wait(self) -> None: ...


class DiskWorker(Protocol):
    """Does work in order on a thread of its own (`host/worker.py`)."""

    def submit(self, work: Callable[[], None], /) -> DiskTicket: ...

    def settle(self) -> None: ...

    def raise_failure(self) -> None: ...

    def close(self) -> None: ...


class StoredStash:
    """A value that waits on disk.

    written  when it is there
    tensors  the places of its tensors; None until they are given to the disk. Micro-batches may share one
    """

    def __init__(self) -> None:
        self.written: DiskTicket
        self.tensors: list[StoredTensor] | None = None


class _Loading:
    """A value on its way from the disk: whoever reads it waits."""

    def __init__(self, stashes: StashesOnDisk, stats: Stats, read: DiskTicket):
        self._stashes, self._stats, self._read = stashes, stats, read

    def complete(self, value: RuntimeValue) -> None:
        """Wait until it is in memory. Raises `DiskError`."""
        value.arrival = None
        self._stashes.wait_for(self._read, self._stats)
        self._stashes.check()


class OnItsWay(Protocol):
    """A value that was read, or is being read: until its copy to the device is given to a lane, it has an arrival."""

    @property
    def arrival(self) -> Any: ...

    @property
    def readers(self) -> Mapping[str, Any]: ...


_Value = TypeVar("_Value", bound=OnItsWay)
_Written = TypeVar("_Written")


class StashWindow(Generic[_Written, _Value]):
    """The stashes in host memory on their way to the disk, or back, and which of them the caller waits for when they are too many.

    bytes  for which there is memory
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._written: deque[tuple[int, _Written]] = deque()  # being written, with their bytes
        self._read: deque[tuple[int, _Value]] = deque()  # read, or being read, and not known to be copied, with their bytes

    @property
    def being_written(self) -> int:
        """Bytes of the stashes that nobody has waited for."""
        return sum(each for each, _ in self._written)

    def begin_forward(self, sizes: Sequence[int]) -> None:
        """A forward begins that stores so many bytes in each stash."""
        self.bytes = window(sizes)

    def stored(self, size: int, written: _Written) -> Iterator[_Written]:
        """A stash is being written from now on. What to wait for, so that there is room for another one."""
        self._written.append((size, written))
        while self.being_written + max(each for each, _ in self._written) > self.bytes:
            yield self._written.popleft()[1]

    def room_for(self, size: int) -> Iterator[Any]:
        """The copies to the device to wait for, so that there is room to read a stash."""
        while self._read and size + sum(each for each, _ in self._read) > self.bytes:
            value = self._read[0][1]
            if value.arrival is not None:
                return  # its copy comes later in the program, which reads no more ahead than there is memory for
            self._read.popleft()
            if (copied := value.readers.get(Lane.H2D)) is not None:
                yield copied

    def loaded(self, size: int, value: _Value) -> None:
        """A stash is being read from now on."""
        self._read.append((size, value))

    def clear(self) -> None:
        """Nothing is on its way."""
        self._written.clear()
        self._read.clear()


class StashesOnDisk:
    """The stashes of a compiled model on disk. All methods are called by the caller.

    folders  where their file is, from the first forward on
    workers  the threads of the lanes `disk_write` and `disk_read`
    window   what is on its way
    """

    def __init__(self, folders: Sequence[str], device: Device, worker: Callable[[int, Unwatched, str], DiskWorker]):
        self._folders, self._device = folders, device
        self._writer, self._reader = (worker(1, device.accesses, lane) for lane in (Lane.DISK_WRITE, Lane.DISK_READ))
        self.workers = (self._writer, self._reader)
        for each in self.workers:
            weakref.finalize(self, each.close)
        self._store: StashStore | None = None
        self.window = StashWindow[DiskTicket, RuntimeValue]()

    @property
    def store(self) -> StashStore:
        if self._store is None:
            self._store = StashStore(*self._folders)
        return self._store

    def check(self) -> None:
        """Raise the error of a transfer that has failed: a `DiskError`, in every step from then on."""
        self._check_store()
        for worker in self.workers:
            worker.raise_failure()

    def _check_store(self) -> None:
        if self._store is not None:
            self._store.check()

    def begin_forward(self, sizes: Sequence[int]) -> StashExtent | None:
        """Room on disk for the stashes of a forward, each with its bytes; None if it stores none. Raises `DiskError`."""
        self.check()
        self.window.begin_forward(sizes)
        return self.store.extent(sum(sizes)) if sizes else None

    def put(self, x: RuntimeValue, size: int, extent: StashExtent, stats: Stats) -> RuntimeValue:
        """Have a value of the host written, whose memory is free then. Waits while too much is being written. Raises `DiskError`."""
        result = RuntimeValue([])
        result.lane, result.on_disk = Lane.DISK_WRITE, StoredStash()
        stash, accesses = result.on_disk, self._device.accesses

        def work() -> None:
            if x.event is not None:
                self._device.wait_on_host(x.event)
            accesses.read(x.place)
            if x.tensors is None:
                return  # the lane that fills it has failed, and raises its error when the caller waits for it
            stash.tensors = self._write(x.tensors, extent)
            stats.disk_stash_bytes += sum(whole_pages(t.nbytes) for t in dict.fromkeys(stash.tensors))
            x.tensors = None

        accesses.give(Lane.DISK_WRITE, lambda: accesses.write(result.place))[0]()  # noted now: the thread may come to it too late
        stash.written = self._writer.submit(work)
        for ticket in self.window.stored(size, stash.written):
            self.wait_for(ticket, stats)
        self.check()
        return result

    def get(self, x: RuntimeValue, size: int, stats: Stats) -> RuntimeValue:
        """Have a value read into memory. Whoever reads the result waits until it is there, and frees it.

        Waits while the device has still to copy too much of what was read before: the caller may be far ahead of it.
        """
        for copied in self.window.room_for(size):
            self._device.wait_on_host(copied)
        result, stash, accesses = RuntimeValue(), x.on_disk, self._device.accesses
        result.lane, result.is_loaded = Lane.DISK_READ, True

        def work() -> None:
            stash.written.wait()
            accesses.read(x.place)
            self._check_store()
            if stash.tensors is None:
                raise L2LError("a stash was not written, since an earlier one could not be")
            result.tensors = self._read(stash.tensors)

        accesses.give(Lane.DISK_READ, lambda: accesses.write(result.place))[0]()  # noted now: the thread may come to it too late
        result.arrival = _Loading(self, stats, self._reader.submit(work))
        self.window.loaded(size, result)
        return result

    def wait_for(self, ticket: DiskTicket, stats: Stats) -> None:
        start = self._device.now()
        ticket.wait()
        stats.disk_stash_wait_seconds += self._device.now() - start

    def recover(self) -> None:
        """After a failure in a step: wait until nothing is under way. Its places on disk are free when its values are gone."""
        try:
            for worker in self.workers:
                worker.settle()
        finally:
            self.window.clear()

    def _write(self, tensors: Sequence[torch.Tensor], extent: StashExtent) -> list[StoredTensor]:
        """Write tensors, each once (lane disk_write). Returns when they are written."""
        made: dict[tuple, StoredTensor] = {}
        for key, tensor in zip(map(_key, tensors), tensors, strict=True):
            if key not in made:
                made[key] = self._write_one(tensor, extent)
        self._settle(list(made.values()))
        return [made[_key(tensor)] for tensor in tensors]

    def _read(self, stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
        """Read tensors, each once, into memory from which a copy to the device is fast (lane disk_read)."""
        transfers, made = [], dict[StoredTensor, torch.Tensor]()
        for each in dict.fromkeys(stored):
            size = whole_pages(each.nbytes)
            lease = self._device.lease(size, "stashes from the disk")
            transfers.append(self._begin_to_read(each, lease.tensor(0, torch.Size([size]), torch.uint8)))
            made[each] = lease.tensor(0, each.shape, each.dtype)
        for transfer in filter(None, transfers):
            transfer.wait()
        return [made[each] for each in stored]

    def _write_one(self, tensor: torch.Tensor, extent: StashExtent) -> StoredTensor:
        return self.store.write_tensor(tensor, extent)

    def _settle(self, stored: Sequence[StoredTensor]) -> None:
        self.store.settle_writes(stored)

    def _begin_to_read(self, stored: StoredTensor, memory: torch.Tensor) -> Transfer | None:
        return self.store.read_into(stored, memory)


def _key(tensor: torch.Tensor) -> tuple:
    return *address(tensor), tensor.shape


def window(sizes: Sequence[int]) -> int:
    """Bytes of host memory for stashes on their way to the disk, or back; `sizes` are those of each of them."""
    return (DISK_AHEAD + 1) * max(sizes, default=0)


def host_bytes(forward: Sequence[int], backward: fx.Graph | None, bindings: Bindings) -> int:
    """Host memory for stashes on their way, and for the buffers of those that do not begin on a page.

    `forward` has the bytes of each stash. In `backward`, what is read ahead is in memory until its copy to the device.
    """
    at_once = most = 0
    for node in backward.nodes if backward is not None and forward else ():
        source = nodes.operands(node).x if node.target in (nodes.load, nodes.restore) else None
        is_loaded = node.target is nodes.load or source is not None and source.target is nodes.load
        size = node.meta["spec"].bytes(bindings) if is_loaded else 0
        if size >= LEAST_ON_DISK:
            at_once += size if node.target is nodes.load else -size
            most = max(most, at_once)
    return max(window(forward), most) + BUFFER_BYTES if forward else 0


def sizes_on_disk(stores: Sequence[fx.Node], rows: StepRows) -> dict[fx.Node, int]:
    """The nodes, among these `store` nodes, whose values are not too small for the disk in a step, with their bytes there."""
    return {
        node: sum(whole_pages(_bytes(shape, spec.dtype)) for shape in rows.shapes(spec, node.meta["split"]))
        for node in stores
        if (spec := node.meta["spec"]).bytes(rows.bindings) >= LEAST_ON_DISK
    }


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
