"""The host memory that a program needs, by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..devices.registry import kind_of
from ..devices.staging import ring_bytes
from ..ir.captured import Input
from ..ir.precision import gradient_dtype
from ..ir.program import Program
from ..ir.segments import Segment
from ..ir.values import TensorSpec
from ..memory.layout import aligned
from ..options import Options
from ..units import format_bytes
from .optimizer.torch_step import state_bytes_of_trial
from .server import segments_in_flight


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host; `print` shows them in all and for each parameter.

    parameters       number of entries of all parameters, on all ranks
    master           the parameters
    wire             their copies in the format that crosses the link, one per segment
    gradients        gradients for `p.grad`, or gradients that wait for `optimizer.step()`
    ring             gradients of a few segments at most, between the link and their place in `gradients`, or their update
    optimizer_state  None without the option `optimizer`
    pinned           page-locked memory that the device copies from
    shared           the part of the wire in memory that gradients take in backward; a loop that still holds the gradients of
                     the last step during forward (`zero_grad` after it, several backwards a step) needs memory for both
    """

    parameters: int
    master: int
    wire: int
    gradients: int
    ring: int
    optimizer_state: int | None
    pinned: int
    shared: int

    @property
    def total(self) -> int:
        return self.master + self.wire - self.shared + self.gradients + self.ring + (self.optimizer_state or 0)

    def __str__(self) -> str:
        rows = [("master", self.master), ("wire", self.wire), ("gradients", self.gradients)]
        rows += [("gradients on their way", self.ring)] if self.ring else []
        rows += [("optimizer state", self.optimizer_state)] if self.optimizer_state is not None else []
        rows += [("in all", self.total)]
        shown = ", ".join(f"{name} {format_bytes(count)} ({count / max(self.parameters, 1):.1f})" for name, count in rows)
        shared = f"; {format_bytes(self.shared)} of the wire are where gradients go later" if self.shared else ""
        pinned = f"; pinned of these or beside them: {format_bytes(self.pinned)}" if self.pinned else ""
        return f"host memory (bytes a parameter): {shown}{shared}{pinned}"


def host_memory(programs: Sequence[Program], options: Options) -> HostMemory:
    """The host memory that these programs of one model need."""
    segments = [_SegmentMemory.of(segment, program, options) for program in programs for segment in program.segments]
    parameters = {name: spec for segment in segments for name, spec in segment.parameters}
    trained = [spec for spec in parameters.values() if spec.differentiable]
    wires = _wires(segments, options)
    kept, ring = _gradients(trained, max((segment.pushed for segment in segments), default=0), options)
    return HostMemory(
        parameters=sum(_entries(programs).values()),
        master=sum(_master_bytes(spec, options) for spec in parameters.values()),
        wire=sum(wire.size for wire in wires),
        gradients=kept,
        ring=ring,
        optimizer_state=_optimizer_state(trained, options),
        pinned=_pinned(wires, options),
        shared=_shared(wires, options),
    )


def _entries(programs: Sequence[Program]) -> dict[str, int]:
    """Entries of each parameter, on all ranks."""
    return {
        weight.name: math.prod(spec.sizes(program.bindings))
        for program in programs
        for segment in program.segments
        for weight, spec in zip(segment.weights, segment.block.weights, strict=True)
        if weight.kind == "parameter"
    }


@dataclass(frozen=True)
class _SegmentMemory:
    """Bytes for one segment's parameters, by purpose.

    parameters  each by its name
    wire        in the format that crosses the link
    room        of the gradients that get memory as wide as their parameters
    pushed      of all their gradients on the link
    """

    parameters: tuple[tuple[str, TensorSpec], ...]
    wire: int
    room: int
    pushed: int

    @classmethod
    def of(cls, segment: Segment, program: Program, options: Options) -> _SegmentMemory:
        weights = zip(segment.weights, segment.block.weights, strict=True)
        parameters = tuple(  # a weight of a model that is a plain function may have symbolic sizes
            (weight.name, replace(spec, shape=_on_this_host(weight, spec, program)))
            for weight, spec in weights
            if weight.kind == "parameter"
        )
        trained = [spec for _, spec in parameters if spec.differentiable]
        return cls(
            parameters,
            wire=sum(aligned(spec.bytes({})) for _, spec in parameters),
            room=sum(_master_bytes(spec, options) for spec in trained if _is_widened(spec, options)),
            pushed=sum(_on_link(spec, options) for spec in trained),
        )


def _on_this_host(weight: Input, spec: TensorSpec, program: Program) -> tuple[int, ...]:
    """The shape of a parameter on the host; for a divided parameter, the shape of the largest piece."""
    return spec.sizes(program.bindings) if weight.pieces is None else weight.pieces.shape_of(0)


@dataclass(frozen=True)
class _WireMemory:
    """The bytes of a wire, the bytes that gradients will need in its memory, and whether it is page-locked."""

    size: int
    room: int
    pinned: bool


def _wires(segments: Sequence[_SegmentMemory], options: Options) -> list[_WireMemory]:
    """The wires of all segments, in the order of the program. Segments with the same parameters share a wire."""
    if options.precision == "fp32":
        return []
    different = {tuple((name, spec.dtype) for name, spec in segment.parameters): segment for segment in segments}
    wires, locked = [], ring_bytes(options.pinned_memory)
    for segment in different.values():
        pinned = kind_of(options.device).pins_memory and _has_room(locked + segment.wire, options)
        locked += segment.wire if pinned else 0
        wires.append(_WireMemory(segment.wire, segment.room, pinned))
    return wires


def _has_room(locked: int, options: Options) -> bool:
    return options.pinned_memory is None or locked <= options.pinned_memory


def _pinned(wires: Sequence[_WireMemory], options: Options) -> int:
    if not kind_of(options.device).pins_memory:
        return 0
    return ring_bytes(options.pinned_memory) + sum(wire.size for wire in wires if wire.pinned)


def _shared(wires: Sequence[_WireMemory], options: Options) -> int:
    if options.update != "at_step":
        return 0
    return sum(min(wire.size, wire.room) for wire in wires if not wire.pinned)


def _gradients(trained: Sequence[TensorSpec], largest_push: int, options: Options) -> tuple[int, int]:
    """Bytes of gradients that stay on the host, and of gradients that are not yet at their place or updated."""
    wide, on_link = sum(_master_bytes(spec, options) for spec in trained), sum(_on_link(spec, options) for spec in trained)
    if options.update == "at_step" or options.accumulate != 1:
        kept, stay_as_they_come = wide, on_link == wide
    elif options.update == "in_forward":
        kept, stay_as_they_come = on_link, True
    else:
        kept, stay_as_they_come = 0, False
    return kept, 0 if stay_as_they_come else min(on_link, segments_in_flight(options) * largest_push)


def _optimizer_state(trained: Sequence[TensorSpec], options: Options) -> int | None:
    if options.optimizer is None:
        return None
    return state_bytes_of_trial(options.optimizer) * sum(map(_count, trained))


def _is_widened(spec: TensorSpec, options: Options) -> bool:
    """Whether a gradient from the link is copied to memory as wide as its parameter."""
    return _on_link(spec, options) < _master_bytes(spec, options)


def _count(spec: TensorSpec) -> int:
    return spec.bytes({}) // spec.dtype.itemsize


def _master_bytes(spec: TensorSpec, options: Options) -> int:
    """A parameter on the host: in fp32 where another precision crosses the link."""
    return _count(spec) * (4 if options.precision != "fp32" else spec.dtype.itemsize)


def _on_link(spec: TensorSpec, options: Options) -> int:
    return _count(spec) * gradient_dtype(spec, options.gradients_on_link).itemsize
