"""Lanes with something around each piece of their work: a pause, a clock, a wait for the whole device; memory that is
filled with NaN when it is freed.

A lane of a device is replaced by an `Around`, which hands everything on to it; `restore` puts the lanes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from l2l_compile.devices.cuda import CudaDevice
from l2l_compile.devices.device import LANES, Device, Lane
from l2l_compile.devices.ledger import Ledger
from l2l_compile.ir import nodes

Work = Callable[[], None]
PAUSE_CYCLES = 2_000_000  # of a GPU: about a millisecond
PAUSE_SECONDS = 0.003  # of a thread


class Around(Lane):
    """Another lane. `inside` runs on it in the place of each piece of work, which it is given; `after` when work was queued."""

    def __init__(self, lane: Lane, inside: Callable[[Work], None] | None = None, after: Callable[[], None] | None = None):
        self.lane, self._inside, self._after = lane, inside, after

    @property
    def stream(self) -> torch.cuda.Stream:
        """That of a lane of a GPU."""
        return self.lane.stream

    def run(self, work: Work) -> None:
        self.lane.run(work if self._inside is None else lambda: self._inside(work))
        if self._after is not None:
            self._after()

    def record(self) -> Any:
        return self.lane.record()

    def wait(self, event: Any) -> None:
        self.lane.wait(event)

    def synchronize(self) -> None:
        self.lane.synchronize()


def restore(device: Device) -> None:
    """The lanes as they were."""
    for name, lane in device.lanes.items():
        device.lanes[name] = lane.lane if isinstance(lane, Around) else lane


def slow_down(device: Device, name: str) -> None:
    """A pause on one lane before each piece of its work."""

    def inside(work: Work) -> None:
        pause(device)
        work()

    device.lanes[name] = Around(device.lanes[name], inside)


def pause(device: Device, times: int = 1) -> None:
    """Called on a lane: it does nothing for a while."""
    if device.torch_device.type == "cuda":
        torch.cuda._sleep(PAUSE_CYCLES * times)
    else:
        time.sleep(PAUSE_SECONDS * times)


def one_after_the_other(device: Device) -> None:
    """Every piece of work is done before the next is given to any lane: no order of waits matters."""

    def after() -> None:
        device.synchronize()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)

    for name in LANES:
        device.lanes[name] = Around(device.lanes[name], after=after)


class PoisoningCuda(CudaDevice):
    """A GPU whose freed memory is filled on the compute lane, where it is freed: with NaN, in integers with -1."""

    def __init__(self, device: torch.device, pinned_memory: int | None = None):
        super().__init__(device, pinned_memory)
        self._held = Ledger()

    def reserve_slabs(self, count: int, size: int) -> None:
        if count == 0:
            self._held.clear()
        super().reserve_slabs(count, size)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held.hold(tensors)

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self.lanes["compute"].stream):
            for tensor in self._held.drop(tensors):
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                whole.fill_(255)


@dataclass(frozen=True)
class Piece:
    """A piece of work of a lane: what it was for, and when it began and ended (CUDA events, or seconds)."""

    lane: str
    label: str
    start: Any
    end: Any

    def seconds_until(self, other: Piece) -> float:
        """From the end of this piece to the start of another."""
        return _between(self.end, other.start)

    @property
    def seconds(self) -> float:
        return _between(self.start, self.end)


def _between(start: Any, end: Any) -> float:
    """Events of one GPU, all of which have happened, or seconds."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class _Measured(Around):
    """A lane that notes each piece of its work, with the node that was under way when the work was given."""

    def __init__(self, lane: Lane, timeline: Timeline, name: str):
        super().__init__(lane)
        self._timeline, self._name = timeline, name

    def run(self, work: Work) -> None:
        label = self._timeline.label
        self.lane.run(lambda: self._timeline.note(self._name, label, work))


class Timeline:
    """Notes begin and end of every piece of work of a device; `stop` before the pieces are read."""

    def __init__(self, device: Device):
        self.pieces: list[Piece] = []
        self.label = ""
        self._device = device
        device.begins = self._begins
        for name in LANES:
            device.lanes[name] = _Measured(device.lanes[name], self, name)

    def stop(self) -> None:
        restore(self._device)
        del self._device.begins
        self._device.synchronize()

    def _begins(self, node: fx.Node, segment: str) -> None:
        kind = getattr(node.target, "__name__", str(node.target))
        self.label = f"{kind} {segment}".rstrip()
        if node.target is nodes.release:  # compute waits there for copies: say for which
            readers = {getattr(user.target, "__name__", user.op) for user in node.args[0].users if user is not node}
            self.label = f"{kind} behind {', '.join(sorted(readers))}"

    def note(self, lane: str, label: str, work: Work) -> None:
        """Run a piece of work, on its lane, and note when."""
        start = self._now()
        work()
        self.pieces.append(Piece(lane, label, start, self._now()))

    def _now(self) -> Any:
        if self._device.torch_device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the lane's stream, which is the current one
        return event

    def of(self, lane: str) -> list[Piece]:
        """The pieces of a lane, in their order."""
        return [piece for piece in self.pieces if piece.lane == lane]
