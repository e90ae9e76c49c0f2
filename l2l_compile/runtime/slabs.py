"""Which weight slab a fetch takes, and which weights a forward leaves in slabs for its backward.

Slabs rotate. A backward begins with the segments that its forward fetched last, so their weights stay in their slabs. If
another forward takes these slabs in between, backward fetches the weights again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from l2l_compile.devices.device import Device, Kept
from l2l_compile.lanes import Lane
from l2l_compile.races import Place
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.step import Step


class Slabs:
    """The slabs of a device during one run of a graph.

    fetches  how many fetches the graph has
    keep     whether the last of them stay in their slabs for a backward of the same step
    free     for each slab the event after which it may be written, None for at once
    places   of the slabs, watched for races
    """

    def __init__(self, device: Device, step: Step, count: int, fetches: int, keep: bool):
        self.device, self.step = device, step
        self.free: list[Any] = [None] * count
        self.places = [Place(f"weight slab {number}") for number in range(count)]
        self._order = deque(sorted(range(count), key=lambda slab: slab in device.kept))  # the one to be taken next comes first
        self._fetches, self._keep = fetches, keep and device.keeps_slabs
        self._to_keep: dict[int, int] = {}  # segments, by slab

    def take(self, segment: int, may_stay: bool) -> tuple[int, Kept | None]:
        """The slab for a segment's weights, and the weights if forward left them there. `may_stay`: forward may leave them."""
        self._fetches -= 1
        slab = next((slab for slab, kept in self.device.kept.items() if kept.of(self.step, segment)), None)
        if slab is not None:
            self._order.remove(slab)
            self._order.append(slab)
            return slab, self.device.kept.pop(slab)
        slab = self._order.popleft()
        self._order.append(slab)
        self._evict(slab)
        if self._keep and may_stay and self._fetches < len(self.free):
            self._to_keep[slab] = segment
        return slab, None

    def keeps(self, x: RuntimeValue) -> Kept | None:
        """If the weights of a slab stay in it, the object that holds them from now on; else None."""
        if x.slab is None:
            return None
        segment = self._to_keep.pop(x.slab, None)
        if segment is None or x.unfetched:
            return None
        kept = self.device.kept[x.slab] = Kept(self.step, segment)
        return kept

    def end(self) -> None:
        """Free the weights that the step has left in slabs: no backward will read them."""
        for slab in [slab for slab, kept in self.device.kept.items() if kept.of(self.step)]:
            self._evict(slab)

    def _evict(self, slab: int) -> None:
        kept, compute = self.device.kept.pop(slab, None), self.device.lanes[Lane.COMPUTE]
        if kept is not None:
            compute.run(lambda: self.device.free(kept.tensors))
            self.free[slab] = compute.record()
