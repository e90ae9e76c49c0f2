"""What a step keeps of its layers' computation for backward, within the option `keep`, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from l2l_compile.estimate.device_memory import StepLevels, levels_of_step, runs_of, savings_for
from l2l_compile.ir.program import Program
from l2l_compile.options import Options
from l2l_compile.runtime.kept_activations import Room, masks_of
from l2l_compile.simulation.machine import Machine
from l2l_compile.units import format_bytes

_SHOWN = 3  # segments that share a reason


@dataclass(frozen=True)
class KeptActivations:
    """What forwards keep of what they compute inside of segments.

    bytes     of device memory in all segments, at the end of forward
    on_host   bytes of host memory, which cross the link in forward and come back in backward
    segments  how many segments keep something
    of        how many segments run backward
    share     the part of the seconds of recompute that they save, by an estimate from FLOPs and bytes
    nothing   the segments that cannot keep anything, by the reason
    """

    bytes: int
    on_host: int
    segments: int
    of: int
    share: float
    nothing: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        on_host = f" and {format_bytes(self.on_host)} of host memory" if self.on_host else ""
        kept = (
            f"kept inside of layers for backward: {format_bytes(self.bytes)} of device memory (among the stashes){on_host}, in {self.segments} of "
            f"{self.of} segments that run backward; saves about {self.share:.0%} of the recompute"
        )
        few = {reason: ", ".join(names[:_SHOWN]) + " …" * (len(names) > _SHOWN) for reason, names in self.nothing.items()}
        return "\n".join([kept, *(f"  nothing of {names}: {reason}" for reason, names in few.items())])


def room_in(levels: StepLevels) -> Room:
    """The bytes that a step keeps."""
    return Room.sum(of_segment.room for kept in levels for of_segment in kept.values())


def kept_activations(
    programs: Sequence[Program], options: Options, machine: Machine | None, levels: StepLevels | None = None
) -> KeptActivations | None:
    """What one step through these programs keeps; None without the options. Raises `LoweringError`."""
    if not options.keeps_activations or all(program.backward is None for program in programs):
        return None
    savings = savings_for(options)
    levels = levels if levels is not None else levels_of_step(programs, options, machine, savings)
    found = [of_segment for kept in levels for of_segment in kept.values()]
    possible, count, nothing = 0.0, 0, dict[str, list[str]]()
    for program in programs:
        for index, mask in masks_of(program).items():
            segment, count = program.segments[index], count + 1
            runs = runs_of(program, segment, options.micro_batches)
            possible += sum(savings.seconds(segment.block, bindings, mask).recompute for bindings in runs)
            if reason := savings.why_none(segment.block, runs[0], mask):
                nothing.setdefault(reason, []).append(segment.name)
    saved, size = sum(of_segment.seconds for of_segment in found), room_in(levels)
    return KeptActivations(size.device, size.host, len(found), count, saved / possible if possible else 0.0, nothing)
