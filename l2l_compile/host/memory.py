"""What a program needs of the host's memory, by what it is for."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.program import Program
from ..ir.text import format_bytes
from ..ir.values import TensorSpec
from ..options import Options
from ..precision import gradient_dtype
from ..runtime.device import aligned
from ..runtime.staging import ring_bytes
from .server import segments_in_flight
from .torch_step import state_bytes_of_trial


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
    """

    parameters: int
    master: int
    wire: int
    gradients: int
    ring: int
    optimizer_state: int | None
    pinned: int

    @property
    def total(self) -> int:
        return self.master + self.wire + self.gradients + self.ring + (self.optimizer_state or 0)

    def __str__(self) -> str:
        rows = [("master", self.master), ("wire", self.wire), ("gradients", self.gradients)]
        rows += [("gradients on their way", self.ring)] if self.ring else []
        rows += [("optimizer state", self.optimizer_state)] if self.optimizer_state is not None else []
        rows += [("in all", self.total)]
        shown = ", ".join(f"{name} {format_bytes(count)} ({count / max(self.parameters, 1):.1f})" for name, count in rows)
        pinned = f"; pinned of these or beside them: {format_bytes(self.pinned)}" if self.pinned else ""
        return f"host memory (bytes a parameter): {shown}{pinned}"


def host_memory(programs: Sequence[Program], options: Options) -> HostMemory:
    """What these programs of one model need of the host's memory."""
    parameters: dict[str, TensorSpec] = {}
    wires: dict[tuple, int] = {}
    pushes = []
    for program in programs:
        for segment in program.segments:
            weights = [(w.name, s) for w, s in zip(segment.weights, segment.block.weights, strict=True) if w.kind == "parameter"]
            parameters.update(weights)
            wires[tuple((name, s.dtype) for name, s in weights)] = sum(aligned(s.bytes({})) for _, s in weights)
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
    wire = sum(wires.values()) if narrow else 0
    state = None
    if options.optimizer is not None:
        state = state_bytes_of_trial(options.optimizer) * sum(map(_count, trained))
    on_cuda = options.device.type == "cuda"
    return HostMemory(
        sum(map(_count, parameters.values())), master, wire, kept, ring, state,
        pinned=_pinned(list(wires.values()) if narrow else [], options) if on_cuda else 0,
    )  # fmt: skip


def _pinned(wires: Sequence[int], options: Options) -> int:
    """The ring, and the wires that fit into the budget, in the order of the program."""
    total = ring_bytes(options.pinned_memory)
    for size in wires:
        if options.pinned_memory is None or total + size <= options.pinned_memory:
            total += size
    return total


def _count(spec: TensorSpec) -> int:
    return spec.bytes({}) // spec.dtype.itemsize


def _master_width(spec: TensorSpec, options: Options) -> int:
    return 4 if options.precision != "fp32" else spec.dtype.itemsize


def _on_link(spec: TensorSpec, options: Options) -> int:
    return _count(spec) * gradient_dtype(spec, options.gradients_on_link).itemsize
