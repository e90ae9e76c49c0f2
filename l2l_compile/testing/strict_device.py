"""A stand-in for a GPU: every lane is a thread, device memory is apart from the host's, freed memory becomes NaN.

A program with correct waits gives the same numbers here as on the host, whatever the delays. A program that reads a
value before it is filled finds no tensors. A program that reads a value after its release finds NaN. Used by the tests.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from l2l_compile.devices.counted import Counted
from l2l_compile.devices.device import LaneQueue
from l2l_compile.devices.host import HOST, half_of_the_cores
from l2l_compile.devices.ledger import Ledger
from l2l_compile.devices.staging import Staging
from l2l_compile.lanes import OF_DEVICE, Lane
from l2l_compile.memory.finalizers import taken
from l2l_compile.memory.pages import PinnedMemory, Pool


@dataclass
class _Queue:
    """The state that a lane and its thread share. `failures` is the device's list; `failed` is an error not yet raised."""

    delay: float
    random: random.Random
    failures: list[BaseException]
    work: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    failed: BaseException | None = None

    def run(self) -> None:
        """Do queued work until `None` comes."""
        while (work := self.work.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                if self.failed is None:
                    time.sleep(self.random.random() * self.delay)
                    with torch.no_grad():
                        work()
            except BaseException as error:  # noqa: BLE001 - handed to the caller by synchronize
                self.failed = error
                self.failures.append(error)
            del work  # else it would stay alive until the next work comes


class _Thread(LaneQueue):
    """The thread ends when the lane is garbage-collected. Errors are added to `failures`, which all lanes of a device share."""

    def __init__(self, name: str, delay: float, seed: int, failures: list[BaseException]):
        self._queue = _Queue(delay, random.Random(seed), failures)
        threading.Thread(target=self._queue.run, name=f"l2l-{name}", daemon=True).start()
        weakref.finalize(self, self._queue.work.put, None)

    def run(self, work: Callable[[], None]) -> None:
        self._queue.work.put(work)

    def record(self) -> threading.Event:
        event = threading.Event()
        self._queue.work.put(event)
        return event

    def wait(self, event: threading.Event) -> None:
        self._queue.work.put(event.wait)

    def synchronize(self) -> None:
        self.record().wait()
        failed, self._queue.failed = self._queue.failed, None
        if failed is not None:
            raise failed

    def reseed(self, seed: int) -> None:
        self._queue.random.seed(seed)


class ThreadedDevice(Counted):
    """`delay` is the longest pause in seconds before each piece of work; `seed` fixes the pauses' lengths.

    Tensors of the device are on `torch_device`: on the host, unless a test has another type of device.
    """

    launches_first = takes_norms = True

    def __init__(self, delay: float = 0.001, seed: int = 0, pinned_memory: int | None = None, torch_device: torch.device = HOST):
        self.torch_device = torch_device
        self.locked: dict[int, int] = {}
        self.pinned = PinnedMemory(pinned_memory, self.locked.__setitem__, self.locked.__delitem__)
        self._staging = Staging(self.pinned, lambda: None, threading.Event.wait)  # copies on a lane's thread are synchronous
        self._pool = Pool(self.pinned, lambda event: event.is_set())
        self._failures: list[BaseException] = []
        self._threads = [_Thread(name, delay, seed + i, self._failures) for i, name in enumerate(OF_DEVICE)]
        self.lanes = dict(zip(OF_DEVICE, self._threads, strict=True))
        self.ledger = Ledger()
        self._forgotten: deque[Sequence[torch.Tensor]] = deque()
        self.slabs: list[torch.Tensor] = []
        self.kept = {}

    def reseed(self, seed: int) -> None:
        """From now on, pauses are as on a device opened with this seed. Called between steps."""
        for i, lane in enumerate(self._threads):
            lane.reseed(seed + i)

    def reserve_slabs(self, count: int, size: int) -> None:
        if count == 0:
            self.ledger.clear()
        if len(self.slabs) != count or (count and self.slabs[0].numel() < size):
            self.empty_slabs()
            self.slabs = [torch.empty(size, dtype=torch.uint8, device=self.torch_device) for _ in range(count)]
            self.ledger.reserve(self.slabs)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device).copy_(tensor.detach())
        self._pool.reads(tensor, self.lanes[Lane.H2D].record())
        return result

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._pool.empty(tensor.shape, tensor.dtype, "a tensor from the device").copy_(tensor)
        self._pool.reads(host, self.lanes[Lane.D2H].record())
        return host

    def synchronize(self) -> None:
        """Wait for all lanes. Raises the first error: after it, lanes that read a missing result fail as well."""
        for lane in self.lanes.values():
            with contextlib.suppress(BaseException):
                lane.synchronize()
        first, self._failures[:] = self._failures[:1], []
        if first:
            raise first[0]

    def await_ranks(self, check: Callable[[], None]) -> None:
        """A lane that failed has to be told to the other ranks: one of them may be waited for by another lane."""
        events = [lane.record() for lane in self.lanes.values()]
        while not all(event.is_set() for event in events):
            if self._failures:
                raise self._failures[0]
            check()
            time.sleep(_LOOK)

    def recover(self) -> None:
        super().recover()
        self._failures.clear()

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in self.ledger.drop(tensors):
            _poison(tensor)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the tensors until the next step begins, so that they become NaN as well."""
        self._forgotten.append(tensors)

    def start_peak(self) -> None:
        for tensors in taken(self._forgotten):
            self.free(tensors)
        super().start_peak()

    def host_threads(self) -> int:
        return half_of_the_cores()


_LOOK = 1e-3  # seconds between two looks at lanes that may wait for other ranks


def _poison(tensor: torch.Tensor) -> None:
    """Fill freed memory: NaN in floating point, a number far out of range in integers."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        whole.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        whole.logical_not_()
    else:
        whole.fill_(torch.iinfo(tensor.dtype).max // 2)
