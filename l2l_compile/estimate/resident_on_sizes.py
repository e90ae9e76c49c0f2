"""Which weights stay on the device from call to call without gradients: the decisions of a run, made on sizes alone.

The class that decides in a run (`runtime/resident_weights.py`) decides here too, for calls of the same programs, until two calls in
a row have the same weights on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from l2l_compile.devices.device import MemoryState
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.runtime.resident_weights import MeasuredNeed, ResidentWeights
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.simulation.machine import Machine
from l2l_compile.units import format_bytes

_SHOWN = 3  # segments
_MOST_CALLS = 16  # the need of a call is measured in two or three, and each of the others adds segments or changes nothing


@dataclass(frozen=True)
class StayingWeights:
    """The weights that stay on the device from call to call.

    bytes     of the device that they take
    segments  names of their segments, in the order of the programs
    fetched   bytes of the weights that cross the link in each call
    is_known  whether this is all: without a machine, the memory that calls leave free is not known
    """

    bytes: int
    segments: tuple[str, ...]
    fetched: int
    is_known: bool

    def __str__(self) -> str:
        if not self.is_known:
            return (
                "from the second call on, weights also stay on the device as far as its memory is free, which is not counted here: the "
                "option resident bounds them"
            )
        count, shown = len(self.segments), ", ".join(self.segments[:_SHOWN])
        more = f" and {count - _SHOWN} more" * (count > _SHOWN)
        named = f" ({count} segment{'s' * (count != 1)}: {shown}{more})" * bool(count)
        return (
            f"of the weights, {format_bytes(self.bytes)} stay on the device from call to call{named}; {format_bytes(self.fetched)} cross the "
            "link in each call"
        )


@dataclass(frozen=True)
class CallMemory:
    """Bytes of the device that a call of a program takes at its peak beside slabs and weights that stay, and those that it leaves there."""

    peak: int
    kept: int


class _Sizes:
    """A device as numbers."""

    is_host = False

    def __init__(self, slabs: int, machine: Machine | None):
        self._slabs, self._machine = slabs, machine
        self.kept = self.of_call = self.resident = 0

    def memory(self) -> MemoryState | None:
        if self._machine is None:
            return None
        held = self._slabs + self.kept + self.resident
        return MemoryState(held, self._machine.device_room - held, int(self._machine.device_memory))

    def start_peak(self) -> None:
        """A call holds the most at its end here: nothing is measured before."""

    def peak_bytes(self) -> int:
        return self._slabs + self.of_call + self.resident

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing has memory."""


def resident_on_sizes(
    programs: Sequence[Program], calls: Sequence[CallMemory], slabs: int, budget: int | None, machine: Machine | None
) -> StayingWeights:
    """What stays on a device of `machine` behind some calls of all programs, one after another.

    `budget` is the option `resident`. Without a machine, the device is as large as the budget asks for.
    """
    device, needs, kept = _Sizes(slabs, machine), [MeasuredNeed() for _ in programs], [0] * len(programs)
    resident = ResidentWeights(device, budget)
    for _ in range(_MOST_CALLS):
        before = resident.changes
        for number, (program, call) in enumerate(zip(programs, calls, strict=True)):
            device.kept, device.resident = sum(kept), resident.bytes
            resident.begin(needs[number], (), sum(slab_bytes([segment], program.bindings) for segment in program.here))
            for segment in _fetched(program):
                if resident.find(key := _key(segment, number), ()) is None:
                    resident.admit(key, slab_bytes([segment], program.bindings))
            device.of_call, device.resident = call.peak + sum(kept) - kept[number], resident.bytes
            resident.end(needs[number], ())
            kept[number] = call.kept
        if resident.changes == before:
            break
    there = resident.sizes
    sizes = {_key(s, n): (s.name, slab_bytes([s], p.bindings)) for n, p in enumerate(programs) for s in _fetched(p)}
    stays = tuple(name for key, (name, _) in sizes.items() if key in there)
    fetched = sum(size for key, (_, size) in sizes.items() if key not in there)
    return StayingWeights(resident.bytes, stays, fetched, machine is not None or budget is not None)


def _fetched(program: Program) -> list[Segment]:
    """The segments of a forward, in the order in which their weights are fetched."""
    fetches = program.forward.graph.find_nodes(op="call_function", target=nodes.fetch_weights)
    return [program.segments[nodes.operands(node).segment] for node in fetches]


def _key(segment: Segment, program: int) -> tuple:
    """What tells weights apart: parameters by their names, and constants in their program."""
    return tuple(
        (weight.name if weight.index >= 0 else (program, weight.name), spec.dtype)
        for weight, spec in zip(segment.weights, segment.block.weights, strict=True)
    )
