"""What a program needs of the host's memory, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..devices.staging import ring_bytes
from ..ir.precision import gradient_dtype
from ..ir.program import Program
from ..ir.values import TensorSpec
from ..memory.layout import aligned
from ..options import Options
from ..units import format_bytes
from .optimizer.torch_step import state_bytes_of_trial
from .server import segments_in_flight


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host; `print` shows them in all and for each parameter.

    parameters       number of entries of all parameters
    master           the parameters
    wire             their copies in the format that crosses the link, one per segment
    gradients        those that are for `p.grad`, or wait for `optimizer.step()`
    ring             at most a few segments' gradients on their way from the link to there, or to their update
    optimizer_state  None without the option `optimizer`
    pinned           page-locked memory that the device copies from
    shared           of the wire, what is in memory that gradients take in backward; a loop that still holds the gradients
                     of the last step during forward (`zero_grad` after it, several backwards a step) needs it beside them
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
    """What these programs of one model need of the host's memory."""
    parameters: dict[str, TensorSpec] = {}
    wires: dict[tuple, tuple[int, int]] = {}  # bytes, and those that gradients will need in the same memory
    pushes = []
    for program in programs:
        for segment in program.segments:
            weights = [  # a weight of a model that is a plain function may have symbolic sizes
                (w.name, replace(s, shape=s.sizes(program.bindings)))
                for w, s in zip(segment.weights, segment.block.weights, strict=True)
                if w.kind == "parameter"
            ]
            parameters.update(weights)
            room = sum(_count(s) * _master_width(s, options) for _, s in weights if s.differentiable and _is_widened(s, options))
            wires[tuple((name, s.dtype) for name, s in weights)] = (sum(aligned(s.bytes({})) for _, s in weights), room)
            pushes.append(sum(_on_link(s, options) for _, s in weights if s.differentiable))
    narrow = options.precision != "fp32"
    master = sum(_count(s) * _master_width(s, options) for s in parameters.values())
    trained = [s for s in parameters.values() if s.differentiable]
    whole = sum(_count(s) * _master_width(s, options) for s in trained)
    on_link = sum(_on_link(s, options) for s in trained)
    if options.update == "at_step" or options.accumulate > 1:
        kept, stays = whole, on_link == whole
    else:
        kept, stays = (on_link, True) if options.update == "in_forward" else (0, False)
    ring = 0 if stays else min(on_link, segments_in_flight(options) * max(pushes, default=0))
    state = None
    if options.optimizer is not None:
        state = state_bytes_of_trial(options.optimizer) * sum(map(_count, trained))
    crossing = list(wires.values()) if narrow else []
    pinned = _pinned([size for size, _ in crossing], options) if options.device.type == "cuda" else [False] * len(crossing)
    shared = sum(min(sizes) for sizes, locked in zip(crossing, pinned, strict=True) if not locked)
    locked = sum(size for (size, _), locked in zip(crossing, pinned, strict=True) if locked)
    return HostMemory(
        sum(map(_count, parameters.values())), master, sum(size for size, _ in crossing), kept, ring, state,
        pinned=locked + ring_bytes(options.pinned_memory) if options.device.type == "cuda" else 0,
        shared=shared if options.update == "at_step" else 0,
    )  # fmt: skip


def _pinned(wires: Sequence[int], options: Options) -> list[bool]:
    """Which wires fit into the budget beside the ring, in the order of the program."""
    total, found = ring_bytes(options.pinned_memory), []
    for size in wires:
        found.append(options.pinned_memory is None or total + size <= options.pinned_memory)
        total += size if found[-1] else 0
    return found


def _is_widened(spec: TensorSpec, options: Options) -> bool:
    """Whether a gradient is given memory as wide as its parameter when it has come over the link."""
    return _on_link(spec, options) < _count(spec) * _master_width(spec, options)


def _count(spec: TensorSpec) -> int:
    return spec.bytes({}) // spec.dtype.itemsize


def _master_width(spec: TensorSpec, options: Options) -> int:
    return 4 if options.precision != "fp32" else spec.dtype.itemsize


def _on_link(spec: TensorSpec, options: Options) -> int:
    return _count(spec) * gradient_dtype(spec, options.gradients_on_link).itemsize
