"""What a step keeps of its layers' computation for backward, within the option `keep`, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_compile.estimate.device_memory import room_of, savings_for
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment, block_bindings
from l2l_compile.ir.values import Bindings
from l2l_compile.options import Options
from l2l_compile.runtime.kept_activations import KeptLevel, kept_levels, masks_of
from l2l_compile.simulation.machine import Machine
from l2l_compile.units import format_bytes


@dataclass(frozen=True)
class KeptActivations:
    """What forwards keep on the device of what they compute inside of segments.

    bytes     in all segments, at the end of forward
    segments  how many segments keep something
    of        how many segments run backward
    share     the part of the seconds of recompute that they save, by an estimate from FLOPs and bytes
    """

    bytes: int
    segments: int
    of: int
    share: float

    def __str__(self) -> str:
        return (
            f"kept inside of layers for backward: {format_bytes(self.bytes)} of device memory, in {self.segments} of {self.of} segments; "
            f"saves about {self.share:.0%} of the recompute"
        )


def kept_activations(programs: Sequence[Program], options: Options, machine: Machine | None) -> KeptActivations | None:
    """What one step through these programs keeps; None without the option. Raises `LoweringError`."""
    if not options.keep:
        return None
    savings, room = savings_for(options, machine), room_of(programs, options, machine)
    found: list[KeptLevel] = []
    possible, count = 0.0, 0
    for program in programs:

        def runs(segment: Segment, program: Program = program) -> list[Bindings]:
            return block_bindings(segment.block, program.bindings, program.captured.batch, options.micro_batches)

        left = room - sum(level.bytes for level in found)
        found += kept_levels(program, runs, savings, left).values()
        count += len(masks_of(program))
        for index, mask in masks_of(program).items():
            segment = program.segments[index]
            possible += sum(savings.recompute(segment.block, bindings, mask) for bindings in runs(segment))
    saved = sum(level.seconds for level in found)
    return KeptActivations(sum(level.bytes for level in found), len(found), count, saved / possible if possible else 0.0)
