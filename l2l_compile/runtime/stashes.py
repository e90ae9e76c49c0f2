"""What forwards keep for their backwards, and where it waits while other forwards run in between.

A stash that is needed soon stays on the device, as if backward came next. In a model with graph breaks, or one that is called
several times before backward, other forwards come next, each with such stashes of its own; so only the latest forwards'
stay there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from ..devices.device import Device
from .step import RuntimeValue, copies

_NEAR = 2  # forwards whose stashes may stay on the device: a model whose loss is a program of its own copies nothing more


class Stashes:
    """What one forward keeps for backward: boxes, on the device or on the host, freed with this object at the latest."""

    def __init__(self, device: Device, boxes: Sequence[RuntimeValue]):
        self.device, self.boxes = device, list(boxes)
        self._sent: list[RuntimeValue] = []  # those that have gone to the host until backward

    def take(self, keep: bool) -> list[RuntimeValue]:
        """The boxes for one backward, which releases them; copies of them if they must serve again."""
        self._bring_back()
        if keep:
            for box in filter(_on_device, self.boxes):
                self.device.hold(box.tensors)
            return [box.copy() for box in self.boxes]
        boxes, self.boxes = self.boxes, []
        return boxes

    def to_host(self) -> None:
        """What is on the device waits on the host from now on. Called while no lane works."""
        for box in [box for box in self.boxes if _on_device(box)]:
            freed = box.tensors
            self._move(box, "d2h", self.device.download)
            self.device.free(freed)
            self._sent.append(box)

    def _bring_back(self) -> None:
        while self._sent:
            box = self._sent.pop()
            self._move(box, "h2d", self.device.upload)
            self.device.hold(box.tensors)
            box.lane = "compute"

    def _move(self, box: RuntimeValue, lane: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made: list[torch.Tensor] = []
        source = box.tensors
        self.device.lanes[lane].run(lambda: made.extend(copies(source, copy)[0]))
        self.device.synchronize()
        box.tensors, box.lane = made, lane

    def __del__(self) -> None:
        for box in self.boxes:
            if _on_device(box) and box.tensors is not None:
                self.device.free(box.tensors)


class Waiting:
    """The stashes of forwards whose backward is still to come, the latest last. `near` of them may stay on the device."""

    def __init__(self, near: int | None = _NEAR):
        self._near = near
        self._all: list[weakref.ref[Stashes]] = []

    def add(self, stashes: Stashes) -> None:
        """Another forward has run: those before the latest go to the host, unless `near` is None."""
        if self._near is None:
            return
        self._all = [r for r in self._all if (waiting := r()) is not None and waiting.boxes]
        self._all.append(weakref.ref(stashes))
        for reference in self._all[: -self._near]:
            if (waiting := reference()) is not None:
                waiting.to_host()


def _on_device(box: RuntimeValue) -> bool:
    return box.lane == "compute"
