"""The stashes of forwards, and where they wait while other forwards run before the backward.

A stash that backward reads soon stays on the device, as if backward came next. In a model with graph breaks, or in a model that
is called several times before backward, other forwards come next, each with such stashes of its own. So only the stashes of
the latest forwards stay on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from l2l_compile.devices.device import Device
from l2l_compile.lanes import Lane
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.runtime_value import RuntimeValue, copies

_NEAR = 2  # the last forwards may keep stashes on the device: a model and its separately compiled loss need no copies


class Stashes:
    """The values that one forward keeps for backward, on device or host. They are freed with this object at the latest.

    activations  bytes of what was computed inside of segments
    """

    def __init__(self, device: Device, values: Sequence[RuntimeValue], activations: Room):
        self.device, self.values, self.activations = device, list(values), activations
        self._offloaded: list[RuntimeValue] = []  # values that wait on the host until backward

    def take(self, keep: bool) -> list[RuntimeValue]:
        """The values for one backward, which releases them. With `keep`, copies of them, since another backward may follow."""
        self._bring_back()
        if keep:
            for value in filter(_on_device, self.values):
                self.device.hold(value.tensors)
            return [value.copy() for value in self.values]
        values, self.values = self.values, []
        return values

    def to_host(self) -> None:
        """Move the values on the device to the host, until backward. Called while no lane works."""
        self.activations = self.activations._replace(device=0)
        for value in [value for value in self.values if _on_device(value)]:
            freed = value.tensors
            self._move(value, Lane.D2H, self.device.download)
            self.device.free(freed)
            value.set_apart = None
            self._offloaded.append(value)

    def _bring_back(self) -> None:
        while self._offloaded:
            value = self._offloaded.pop()
            self._move(value, Lane.H2D, self.device.upload)
            self.device.hold(value.tensors)
            value.lane = Lane.COMPUTE

    def _move(self, value: RuntimeValue, lane: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made: list[torch.Tensor] = []
        source = value.tensors

        def work() -> None:
            self.device.accesses.read(value.place)
            made.extend(copies(source, copy)[0])

        self.device.lanes[lane].run(work)
        self.device.synchronize()
        self.device.accesses.write(value.place)
        value.tensors, value.lane = made, lane

    def __del__(self) -> None:
        values = getattr(self, "values", ())  # an interrupted `__init__` has none
        held = [tensor for value in values if _on_device(value) and value.tensors for tensor in value.held]
        if held:
            self.device.forget(held)


class StashQueue:
    """The stashes of forwards whose backward is still to come, the latest last. `near` of them may stay on the device."""

    def __init__(self, near: int | None = _NEAR):
        self._near = near
        self._all: list[weakref.ref[Stashes]] = []

    def add(self, stashes: Stashes) -> None:
        """Add the stashes of a forward. Stashes of all but the latest `near` forwards go to the host, unless `near` is None."""
        self._all = [weakref.ref(earlier) for earlier in self._waiting()]
        self._all.append(weakref.ref(stashes))
        if self._near is None:
            return
        for reference in self._all[: -self._near]:
            if (earlier := reference()) is not None:
                earlier.to_host()

    @property
    def activations(self) -> Room:
        """Bytes of what forwards have computed inside of segments and keep for backwards that are still to come."""
        return Room.sum(stashes.activations for stashes in self._waiting())

    def _waiting(self) -> list[Stashes]:
        return [stashes for reference in self._all if (stashes := reference()) is not None and stashes.values]


def _on_device(value: RuntimeValue) -> bool:
    """Whether a lane that makes values of the device has filled it; weights that stay are of the lane `h2d`."""
    return value.lane in (Lane.COMPUTE, Lane.RECV, Lane.H2D)
