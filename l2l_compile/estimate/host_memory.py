"""The host memory that a program needs, by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from l2l_compile.devices.registry import kind_of
from l2l_compile.devices.staging import edge_bytes, ring_bytes
from l2l_compile.host.compiled_step.compiled_step import why_not_compiled
from l2l_compile.host.disk_plan import DiskPlan, disk_plan
from l2l_compile.host.server import largest_segment, segments_in_flight
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.host.updates.norms import PIECE
from l2l_compile.host.wire import is_locked, on_wire, shape_on_host
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec
from l2l_compile.memory.in_place import PAGE
from l2l_compile.memory.layout import aligned
from l2l_compile.options import Options
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.stored_stashes import host_bytes, sizes_on_disk
from l2l_compile.units import format_bytes

_ENDURANCE = 1_200 * 10**12  # bytes that a disk of 2 TB for workstations is rated for


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host; `print` shows them in all and for each parameter.

    parameters       number of entries of all parameters, on all ranks
    master           the parameters, in their own dtypes
    wire             copies of those that cross the link in another dtype, one per segment, two with `delay`
    gradients        gradients for `p.grad`, or gradients that wait for `optimizer.step()`
    ring             gradients of a few segments at most, between the link and their place in `gradients`, or their update; of all
                     segments where they wait for the loss (`schedule="1f1b"`)
    optimizer_state  None without the option `optimizer`, and if it cannot be known: LBFGS needs a closure
    pinned           page-locked memory that the device copies from: parts of the wire and of the master, and staging buffers, which
                     `total` does not count
    shared           the part of the wire in memory that gradients take in backward; a loop that still holds the gradients of
                     the last step during forward (`zero_grad` after it, several backwards a step) needs memory for both
    stashes          values that wait on the host for backward, when forward has ended
    activations      what the option `keep_on_host` keeps there of the inside of segments, at the same time
    disk             where the option `disk` puts masters, optimizer state and copies for the link, which `master`, `optimizer_state` and
                     `wire` do not count then
    stash_buffers    with stash="disk", stashes on their way to the disk, and back
    disk_stashes     bytes of stashes on disk, when forward has ended, which `total` does not count
    stored           other parameters that are on disk, by `load_pretrained`, which `master` does not count either
    in_place         the part of `stored` that is read in place, from the files of `load_pretrained(in_place=True)`. Parameters in place that
                     are trained without the option `disk` count as `master`: an update brings them into memory
    """

    parameters: int
    master: int
    wire: int
    gradients: int
    ring: int
    optimizer_state: int | None
    pinned: int
    shared: int
    stashes: int = 0
    activations: int = 0
    disk: DiskPlan | None = None
    stored: int = 0
    in_place: int = 0
    stash_buffers: int = 0
    disk_stashes: int = 0

    @property
    def total(self) -> int:
        """The most that a step needs: everything above, with memory that two purposes share counted once."""
        return self.of_parameters + self.stashes + self.stash_buffers + self.activations

    @property
    def of_parameters(self) -> int:
        """The part of `total` that does not depend on the batch."""
        of_disk = self.disk.ring if self.disk is not None else 0
        return self.master + self.wire - self.shared + self.gradients + self.ring + (self.optimizer_state or 0) + of_disk

    def __str__(self) -> str:
        rows = [("master", self.master), ("wire", self.wire), ("gradients", self.gradients)]
        rows += [("gradients on their way", self.ring)] if self.ring else []
        rows += [("optimizer state", self.optimizer_state)] if self.optimizer_state is not None else []
        rows += [("buffers of the disk", self.disk.ring)] if self.disk is not None else []
        shown = ", ".join(f"{name} {format_bytes(count)} ({count / max(self.parameters, 1):.1f})" for name, count in rows)
        shown += f", stashes {format_bytes(self.stashes)}" if self.stashes else ""
        shown += f", stashes on their way to the disk {format_bytes(self.stash_buffers)}" if self.stash_buffers else ""
        shown += f", kept inside of layers {format_bytes(self.activations)}" if self.activations else ""
        shown += f", in all {format_bytes(self.total)}"
        shared = f"; {format_bytes(self.shared)} of the wire are where gradients go later" if self.shared else ""
        pinned = (
            f"; {format_bytes(self.pinned)} of these and of staging buffers beside them are page-locked" if self.pinned else ""
        )
        return (
            f"host memory (bytes a parameter): {shown}{shared}{pinned}{_shown_on_disk(self.disk)}{_shown_stashes(self.disk_stashes)}"
            f"{_shown_stored(self.stored, self.in_place)}"
        )


def _shown_on_disk(plan: DiskPlan | None) -> str:
    """A line on what is on disk, and on how long a disk lasts that is written so much in each step."""
    if plan is None:
        return ""
    on_disk = plan.placement.on_disk
    striped = f" striped over {plan.disks} folders" if plan.disks > 1 else ""
    rated = f"{plan.disks} disks are rated for that endure" if plan.disks > 1 else "a disk is rated for that endures"
    lasts = (
        f": {plan.disks * _ENDURANCE // on_disk:,} steps write what {rated} {_ENDURANCE // 10**12:,} TB"
        f"{' each' if plan.disks > 1 else ''}"
        if on_disk
        else ""
    )
    copies = f", copies that cross the link {format_bytes(plan.copies)} (each fetch reads its own, too)" if plan.copies else ""
    return (
        f"\ndisk: master {format_bytes(plan.masters)}, optimizer state {format_bytes(plan.states)}{copies}, in all {format_bytes(on_disk)}{striped}, "
        f"read and written once in a step{lasts}{_shown_places(plan)}"
    )


def _shown_stashes(size: int) -> str:
    return f"\ndisk: stashes {format_bytes(size)}, written in forward and read in backward" if size else ""


def _shown_stored(size: int, in_place: int) -> str:
    if not size:
        return ""
    where = f", {format_bytes(in_place)} of them in place in their safetensors files" if in_place else ""
    return f"\non disk beside these: {format_bytes(size)} of parameters, which cross the link from there{where}"


def _shown_places(plan: DiskPlan) -> str:
    if plan.places == 1:
        return ""
    of_state = "" if plan.places_of_masters == plan.places else f"{plan.places} "
    return f"; {plan.places_of_masters} places of each parameter and {of_state}of its state (resumable) take {format_bytes(plan.on_file)}"


def host_memory(programs: Sequence[Program], options: Options, activations: int = 0) -> HostMemory:
    """The host memory that these programs of one model need, with the bytes of activations that they keep there.

    Raises `L2LError` if the option `host_memory` is too small for them.
    """
    segments = [_SegmentMemory.of(segment, program, options) for program in programs for segment in program.here]
    parameters = {name: spec for segment in segments for name, spec in segment.parameters}
    trained = [spec for spec in parameters.values() if spec.differentiable]
    sent = _sent(segments, options)
    on_disk = [_stashes_on_disk(program, options) for program in programs]
    largest, buffers = max(map(largest_segment, programs), default=0), max((size for size, _ in on_disk), default=0)
    plan = disk_plan(options, largest, buffers) if options.stores_parameters else None
    if plan is not None:
        plan.check()
    state = _optimizer_state(trained, options)
    stored = {name: parameters[name] for segment in segments for name in segment.stored}
    in_place = {name: parameters[name] for segment in segments for name in segment.in_place}
    to_train = options.optimizer is not None or any(program.captured.grad_enabled for program in programs)
    brought = {name for name, spec in in_place.items() if spec.differentiable and to_train}  # into memory, by an update
    not_counted = {
        name: spec for name, spec in stored.items() if not spec.differentiable or (plan is None and name not in brought)
    }
    beside_plan = sum(map(_master_bytes, not_counted.values()))
    kept, ring = _gradients(trained, max((segment.pushed for segment in segments), default=0), options)
    ring += _widened_for_an_update(segments, options)
    return HostMemory(
        parameters=sum(_entries(programs).values()),
        master=sum(map(_master_bytes, parameters.values())) - (plan.masters if plan is not None else 0) - beside_plan,
        wire=sum(wire.size for wire in sent.wires) - (plan.copies if plan is not None else 0),
        gradients=kept + (plan.late_gradients if plan is not None else 0),
        ring=ring,
        optimizer_state=state - plan.states if plan is not None and state is not None else state,
        pinned=_pinned(sent, options, plan.copies if plan is not None else 0),
        shared=_shared(sent.wires, options),
        stashes=sum(sum(program.host_stashes.values()) for program in programs),
        activations=activations,
        disk=plan,
        stored=beside_plan,
        in_place=sum(_master_bytes(spec) for name, spec in not_counted.items() if name in in_place),
        stash_buffers=buffers,
        disk_stashes=sum(size for _, size in on_disk),
    )


def _stashes_on_disk(program: Program, options: Options) -> tuple[int, int]:
    """Bytes of memory for stashes on their way, and of all stashes on disk."""
    rows = StepRows(program.bindings, program.captured.batch, options.micro_batches)
    sizes = [*sizes_on_disk([*program.disk_stashes], rows).values()]
    backward = program.backward.graph if program.backward is not None else None
    return host_bytes(sizes, backward, program.bindings), sum(sizes)


def _entries(programs: Sequence[Program]) -> dict[str, int]:
    """Entries of each parameter, on all ranks; of a pipeline, of this rank's."""
    return {
        weight.name: math.prod(spec.sizes(program.bindings))
        for program in programs
        for segment in program.here
        for weight, spec in zip(segment.weights, segment.block.weights, strict=True)
        if weight.kind == "parameter"
    }


@dataclass(frozen=True)
class _SegmentMemory:
    """Bytes for one segment's parameters, by purpose.

    parameters  each by its name
    on_wire     the dtypes of those that cross the link as copies, by their names
    wire        of these copies
    own         of the parameters that are page-locked where they are, by their names
    stored, in_place  names of the parameters that are on disk, and of those among them that are read in place
    room        of the gradients that get memory as wide as their parameters
    pushed      of all their gradients on the link
    """

    parameters: tuple[tuple[str, TensorSpec], ...]
    on_wire: tuple[tuple[str, torch.dtype], ...]
    wire: int
    own: tuple[tuple[str, int], ...]
    stored: frozenset[str]
    in_place: frozenset[str]
    room: int
    pushed: int

    @classmethod
    def of(cls, segment: Segment, program: Program, options: Options) -> _SegmentMemory:
        weights = enumerate(zip(segment.weights, segment.block.weights, strict=True))
        parameters = {  # a weight of a model that is a plain function may have symbolic sizes
            position: (weight.name, replace(spec, shape=shape_on_host(weight, spec, program.bindings)))
            for position, (weight, spec) in weights
            if weight.kind == "parameter"
        }
        stored, in_place = (
            frozenset(parameters[i][0] for i in parameters if segment.weights[i].owner in found)
            for found in (program.captured.stored, program.captured.in_place)
        )
        trained = [spec for _, spec in parameters.values() if spec.differentiable]
        copied = [parameters.pop(position) for position in on_wire(segment, program.bindings, options)]
        own = parameters.values()
        return cls(
            (*copied, *own),
            on_wire=tuple((name, spec.dtype) for name, spec in copied),
            wire=sum(aligned(spec.bytes({})) for _, spec in copied),
            own=tuple(
                (name, _whole_pages(spec))
                for name, spec in own
                if name not in stored and is_locked(spec, options, program.captured.grad_enabled)
            ),
            stored=stored,
            in_place=in_place,
            room=sum(_master_bytes(spec) for spec in trained if _is_widened(spec, options)),
            pushed=sum(_on_link(spec, options) for spec in trained),
        )


def _whole_pages(spec: TensorSpec) -> int:
    """Bytes of a parameter that are page-locked in place: its memory does not begin with a page."""
    return max(0, spec.bytes({}) // PAGE - 1) * PAGE


@dataclass(frozen=True)
class _WireMemory:
    """The bytes of a wire, the bytes that gradients will need in its memory, and whether it is page-locked."""

    size: int
    room: int
    pinned: bool


@dataclass(frozen=True)
class _Sent:
    """How the parameters of all segments reach the link: on wires, in the order of the program, or from their own memory.

    in_place  bytes of parameters that are page-locked where they are, and of the ring for their ends
    """

    wires: tuple[_WireMemory, ...]
    in_place: int

    @property
    def pinned(self) -> int:
        return self.in_place + sum(wire.size for wire in self.wires if wire.pinned)


def _sent(segments: Sequence[_SegmentMemory], options: Options) -> _Sent:
    """The wires, and the bytes locked in place, within the budget. Segments with the same parameters share a wire."""
    pins, versions = kind_of(options.device).pins_memory, 2 if options.delay else 1
    wires: dict[tuple, _WireMemory] = {}
    in_place: dict[str, int] = {}
    locked = ring_bytes(options.pinned_memory)
    for segment in segments:
        if segment.wire and segment.on_wire not in wires:
            size = versions * segment.wire
            pinned = pins and _has_room(locked + size, options)
            locked += size if pinned else 0
            wires[segment.on_wire] = _WireMemory(size, segment.room, pinned)
        for name, size in segment.own:
            if pins and name not in in_place and _has_room(locked + size, options):
                locked += size
                in_place[name] = size
    edges = edge_bytes() if in_place and _has_room(locked + edge_bytes(), options) else 0
    return _Sent(tuple(wires.values()), sum(in_place.values()) + edges)


def _has_room(locked: int, options: Options) -> bool:
    return options.pinned_memory is None or locked <= options.pinned_memory


def _pinned(sent: _Sent, options: Options, on_disk: int) -> int:
    """`on_disk` are bytes of wires that are on disk: an even share of all."""
    if not kind_of(options.device).pins_memory:
        return 0
    of_wires, wires = sent.pinned - sent.in_place, sum(wire.size for wire in sent.wires)
    left = round(of_wires * (1 - on_disk / wires)) + ring_bytes(options.pinned_memory) if on_disk else of_wires
    return ring_bytes(options.pinned_memory) + sent.in_place + left


def _shared(wires: Sequence[_WireMemory], options: Options) -> int:
    if options.mode.is_overlapped:
        return 0
    return sum(min(wire.size, wire.room) for wire in wires if not wire.pinned)


def _gradients(trained: Sequence[TensorSpec], largest_push: int, options: Options) -> tuple[int, int]:
    """Bytes of gradients that stay on the host, and of gradients that are not yet at their place or updated."""
    wide, on_link = sum(map(_master_bytes, trained)), sum(_on_link(spec, options) for spec in trained)
    if not options.mode.is_overlapped or options.accumulate != 1:
        kept, stay_as_they_come = wide, on_link == wide
    elif options.mode.sees_all:
        kept, stay_as_they_come = on_link, True
    else:
        kept, stay_as_they_come = 0, False
    if options.goes_by_turns:  # all wait for the loss to be differentiated, beside those of backwards before
        return kept, 0 if stay_as_they_come and options.accumulate == 1 else on_link
    return kept, 0 if stay_as_they_come else min(on_link, segments_in_flight(options) * largest_push)


def _widened_for_an_update(segments: Sequence[_SegmentMemory], options: Options) -> int:
    """Bytes of gradients that stay as they came over the link and are widened for a while, where updates wait for the norm.

    The norm is taken of a widened piece of a gradient at a time. A step that is not compiled takes the widened gradients of a segment.
    """
    if not options.mode.keeps_gradients or options.accumulate != 1:
        return 0
    if options.optimizer is None or not options.compile_update or why_not_compiled(options.optimizer) is not None:
        return max((segment.room for segment in segments), default=0)
    trained = (spec for segment in segments for _, spec in segment.parameters if spec.differentiable)
    pieces = (min(_count(spec), PIECE) * _master_bytes(spec) // _count(spec) for spec in trained if _is_widened(spec, options))
    return max(pieces, default=0)


def _optimizer_state(trained: Sequence[TensorSpec], options: Options) -> int | None:
    if options.optimizer is None:
        return None
    of_entry = state_bytes_of_trial(options.optimizer)
    return of_entry * sum(map(_count, trained)) if of_entry is not None else None


def _is_widened(spec: TensorSpec, options: Options) -> bool:
    """Whether a gradient from the link is copied to memory as wide as its parameter."""
    return _on_link(spec, options) < _master_bytes(spec)


def _count(spec: TensorSpec) -> int:
    return spec.bytes({}) // spec.dtype.itemsize


def _master_bytes(spec: TensorSpec) -> int:
    """A parameter on the host, in the dtype that the user gave it: a parameter that is cast for the link is wider than there."""
    return _count(spec) * (spec.compute_dtype or spec.dtype).itemsize


def _on_link(spec: TensorSpec, options: Options) -> int:
    return _count(spec) * gradient_dtype(spec, options.gradients_on_link).itemsize
