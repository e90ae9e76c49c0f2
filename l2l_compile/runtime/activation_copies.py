"""What forward keeps on the host of the inside of its segments: on its way there, and back for backward.

Both ways, copies of some micro-batches run while others are computed. The compute lane frees what was copied, or read, in the order of
the program, so that the device never holds more of them than `ahead` and the one that is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from l2l_compile.devices.device import Device
from l2l_compile.lanes import Lane
from l2l_compile.runtime.overlapped_copies import free_behind
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of
from l2l_compile.runtime.step import Step

_LEAST = 2  # micro-batches that are copied while one is computed
_SHARE = 4  # of those of a segment: a quarter


def ahead(prefetch: int, micro_batches: int) -> int:
    """How many micro-batches are copied while one is computed: none with prefetch=0, where no copy overlaps.

    A value between two segments is copied in one piece, and weights are: the micro-batches behind it wait that long.
    """
    return max(_LEAST, micro_batches // _SHARE) if prefetch else 0


class ActivationsToHost:
    """The copies to the host in one run of a graph: what was sent and is still on the device, with the event of its copy."""

    def __init__(self, device: Device, step: Step):
        self.device, self.step = device, step
        self._on_device: deque[tuple[Any, RuntimeValue]] = deque()

    def free(self, left: int) -> None:
        """Have the compute lane free all but the last ones, as soon as they are copied."""
        while len(self._on_device) > left:
            free_behind(self.device, *self._on_device.popleft())

    def send(self, made: RuntimeValue, target: RuntimeValue, micro_batch: int) -> None:
        """Copy what a micro-batch has saved to the host as soon as it is computed: `target` has a list of tensors for each."""
        d2h, computed = self.device.lanes[Lane.D2H], self.device.lanes[Lane.COMPUTE].record()
        if computed is not None:
            d2h.wait(computed)

        def work() -> None:
            self.device.accesses.read(made.place)
            self.device.accesses.write(target.place)
            target.tensors[micro_batch] = copied = self.device.download_together(made.tensors)
            self.step.stats.offloaded_bytes += bytes_of(copied)

        d2h.run(work)
        target.lane, target.event = Lane.D2H, d2h.record()
        self._on_device.append((target.event, made))
        self.free(ahead(self.step.engine.options.prefetch, len(target.tensors)))

    def stream(self, micro_batches: Sequence[int], target: RuntimeValue) -> SentActivations:
        return SentActivations(self, micro_batches, target)


class SentActivations:
    """The micro-batches of one segment that go to the host. `target.results` has what each of them saves, on the device."""

    def __init__(self, copies: ActivationsToHost, micro_batches: Sequence[int], target: RuntimeValue):
        self._copies, self._micro_batches, self._target = copies, frozenset(micro_batches), target

    def before(self, micro_batch: int) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        return (), (self._target.results[micro_batch],) if micro_batch in self._micro_batches else ()

    def after(self, micro_batch: int) -> None:
        if micro_batch in self._micro_batches:
            self._copies.send(self._target.results[micro_batch], self._target, micro_batch)

    def end(self) -> None:
        """The last copies run while the next segment is computed."""


class ActivationsFromHost:
    """The micro-batches of one segment that come back for its backward. The first ones come while the segment before is computed.

    source  has a list of tensors of the host for each micro-batch, which were there when forward ended
    target  gets such a list of tensors of the device
    """

    def __init__(self, device: Device, step: Step, micro_batches: Sequence[int], source: RuntimeValue, target: RuntimeValue):
        self.device, self.step, self._source, self._target = device, step, source, target
        self._waiting = deque(micro_batches)
        self._ahead = ahead(step.engine.options.prefetch, len(source.tensors))
        self._there: dict[int, tuple[Any, RuntimeValue]] = {}  # events after which they are there
        self._bring(self._ahead)

    def before(self, micro_batch: int) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        is_next = bool(self._waiting) and self._waiting[0] == micro_batch
        self._bring(self._ahead + (micro_batch in self._there or is_next))
        if micro_batch not in self._there:
            return (), ()
        event, value = self._there[micro_batch]
        if event is not None:
            self.device.lanes[Lane.COMPUTE].wait(event)
        return (value,), ()

    def after(self, micro_batch: int) -> None:
        if micro_batch not in self._there:
            return
        _, value = self._there.pop(micro_batch)

        def work() -> None:
            self.device.accesses.write(value.place)
            self.device.free(self._target.tensors[micro_batch])
            self._target.tensors[micro_batch] = None

        self.device.lanes[Lane.COMPUTE].run(work)

    def end(self) -> None:
        """Everything is freed already."""

    def _bring(self, count: int) -> None:
        """Copy the next micro-batches to the device, until so many are there or on their way."""
        while self._waiting and len(self._there) < count:
            micro_batch, value = self._waiting.popleft(), RuntimeValue()
            self._copy(micro_batch, value)
            self._target.lane, self._target.event = Lane.H2D, self.device.lanes[Lane.H2D].record()
            self._there[micro_batch] = self._target.event, value

    def _copy(self, micro_batch: int, value: RuntimeValue) -> None:
        def work() -> None:
            self.device.accesses.read(self._source.place)
            self.device.accesses.write(value.place)
            self._target.tensors[micro_batch] = brought = [self.device.upload(t) for t in self._source.tensors[micro_batch]]
            self.device.hold(brought)
            self.step.stats.restored_bytes += bytes_of(brought)

        self.device.lanes[Lane.H2D].run(work)
