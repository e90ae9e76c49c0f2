"""The stages of a pipeline in a report: what each rank runs and sends, and how long ranks are idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from l2l_compile.ir.program import Program
from l2l_compile.ir.schedule import one_forward_one_back, without_flush
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.stages import Borders, Stages
from l2l_compile.units import format_bytes


def stage_table(program: Program) -> list[str]:
    """Lines on the stages of a program; none for a program of one rank."""
    stages = program.stages
    if stages is None or stages.ranks == 1:
        return []
    title = f"pipeline of {stages.ranks} ranks, this is rank {stages.rank}: {_idle(program, stages)}"
    rows = [("rank", "segments", "parameters", "sends in forward"), *_rows(program, stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [title, *("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _idle(program: Program, stages: Stages) -> str:
    """How long ranks are idle, and in which order they run their micro-batches."""
    turns, schedule = max(segment.micro_batches for segment in program.segments), program.schedule
    share, equal = f"{format_share(bubble(stages.ranks, turns, stages.loops))} of a step idle", "for stages of equal time"
    if schedule is None:
        return f"{share} {equal} ({turns} micro-batches, up to {stages.loops} stages a rank)"
    if schedule == one_forward_one_back(stages.ranks, turns):
        return f"{share} {equal} ({turns} micro-batches, one forward, one back)"
    if turns >= stages.ranks and schedule == without_flush(stages.ranks, turns):
        return f"no rank is idle between steps {equal} ({turns} micro-batches, one forward, one back, without a flush)"
    return f"a schedule of your own ({turns} micro-batches)"


def bubble(ranks: int, turns: int, loops: int) -> float:
    """The share of a step in which a rank waits for others, if all stages take the same time: (d - 1) / (v m + d - 1).

    Source: PipeDream-2BW (arXiv 2006.09503), section 2, and Breadth-First Pipeline Parallelism (arXiv 2211.05953), for v stages a rank.
    """
    return (ranks - 1) / (loops * turns + ranks - 1)


def format_share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _rows(program: Program, stages: Stages) -> Iterator[tuple[str, str, str, str]]:
    borders = Borders(stages, program.segments, ())
    for rank in range(stages.ranks):
        mine = [segment for segment in program.segments if rank in stages.runs_on[segment.index]]
        sent = sum(_sent(program, segment, borders) for segment in mine if stages.runs_on[segment.index][0] == rank)
        yield str(rank), str(len(mine)), format_bytes(_parameters(mine)), format_bytes(sent)


def _parameters(segments: Sequence[Segment]) -> int:
    """Bytes of the parameters of segments, each parameter once."""
    found = {w.name: spec for s in segments for w, spec in zip(s.weights, s.block.weights, strict=True) if w.kind == "parameter"}
    return sum(spec.bytes({}) for spec in found.values())


def _sent(program: Program, segment: Segment, borders: Borders) -> int:
    specs = zip(segment.outputs, segment.block.outputs, strict=True)
    return sum(spec.bytes(program.bindings) * len(borders.receivers(value)) for value, spec in specs)
