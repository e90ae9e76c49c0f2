"""A report as text: first the figures that a user can act on, then the table of blocks. At most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block
from l2l_compile.report.stage_table import stage_table
from l2l_compile.units import format_bytes

WIDTH = 100
_SHOWN = 3  # outputs, and segments that share a reason
_LONGEST_NAME = 16  # columns of a cropped name, at least


def text_of(report: Any) -> str:
    """The text of a `Report`."""
    notes = _reasons(report.programs)
    lines = _paragraphs("", str(report.device_memory))
    lines += _paragraphs("", str(report.kept)) if report.kept is not None else []
    lines += _paragraphs("", str(report.host_memory))
    lines += _whole_batch(report.programs, notes)
    lines += _copied(report)
    lines += _listed(f"graph breaks: {len(report.graph_breaks) or 'none'}", report.graph_breaks)
    if report.uncompiled:
        lines += _listed("run uncompiled, on the host:", report.uncompiled)
    if report.update is not None:
        lines += _paragraphs("", f"updates: {report.update}")
    for number, program in enumerate(report.programs):
        lines += ["", *_table(number, program, notes), *stage_lines(program)]
    return "\n".join(lines)


def stage_lines(program: Program) -> list[str]:
    """The stages of a pipeline."""
    table = stage_table(program)
    return [*_paragraphs("", table[0]), *table[1:]] if table else []


def paragraphs(text: str) -> list[str]:
    """The lines of a text. Lines that are too long are wrapped, and their continuation is indented."""
    return _paragraphs("", text)


def _paragraphs(indent: str, text: str) -> list[str]:
    """As `paragraphs`, with an indent before each line."""
    made: list[str] = []
    for line in text.split("\n"):
        inner = indent + " " * (len(line) - len(line.lstrip()))
        made += textwrap.wrap(
            line.strip(),
            WIDTH,
            initial_indent=inner,
            subsequent_indent=inner + "  ",
            break_long_words=True,
            break_on_hyphens=False,
        )
    return made


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    """A title, and each entry once, with its count if it occurs more than once."""
    counted: dict[str, int] = {}
    for entry in entries:
        counted[entry] = counted.get(entry, 0) + 1
    found = [f"{entry}{f' ({count} times)' if count > 1 else ''}" for entry, count in counted.items()]
    return [title, *(line for entry in found for line in _paragraphs("  ", entry))]


def _reasons(programs: Sequence[Program]) -> dict[str, int]:
    """The reasons for which segments run whole-batch, each with its number in the text."""
    reasons = (segment.block.reason or "" for program in programs for segment in program.whole_batch)
    return {reason: number for number, reason in enumerate(dict.fromkeys(reasons), start=1)}


def _whole_batch(programs: Sequence[Program], notes: dict[str, int]) -> list[str]:
    segments = [segment for program in programs for segment in program.whole_batch]
    count = sum(len(program.segments) for program in programs)
    if not segments:
        return [f"whole batch at once: none of {count} segments"]
    lines = [f"whole batch at once: {len(segments)} of {count} segments"]
    for reason, number in notes.items():
        named = [segment.name for segment in segments if (segment.block.reason or "") == reason]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        lines += _paragraphs("  ", f"[{number}] {', '.join(named[:_SHOWN])}{more}: {reason}")
    return lines


def _copied(report: Any) -> list[str]:
    total, count = sum(o.bytes for o in report.outputs), len(report.outputs)
    lines = [f"outputs copied to the host in every step: {count} tensor{'s' * (count != 1)}, {format_bytes(total)}"]
    if count > 8 or report.large_outputs:
        shown = ", ".join(f"{o.name} {list(o.shape)} {format_bytes(o.bytes)}" for o in report.outputs[:_SHOWN])
        lines += _paragraphs(
            "  ",
            f'the largest: {shown}. outputs="loss" copies the loss alone; a cache of keys and values is not needed in training '
            "(use_cache=False)",
        )
    return lines


def _table(number: int, program: Program, notes: dict[str, int]) -> list[str]:
    rows = [("block", "repeats", "parameters", "segments", "runs")]
    for block in program.blocks:
        members = [s for s in program.segments if s.block is block]
        names = members[0].name if len(members) == 1 else f"{members[0].name} … {members[-1].name}"
        rows.append(
            (
                block.name,
                f"x{block.repeats}",
                format_bytes(members[0].parameter_bytes),
                names,
                _how(block, members[0], notes, not program.captured.grad_enabled),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    widths[3] = max(min(widths[3], WIDTH - 2 * 5 - sum(widths) + widths[3]), _LONGEST_NAME)
    cells = [(*row[:3], _cropped(row[3], widths[3]), row[4]) for row in rows]
    lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(row[:4], widths, strict=False)) + "  " + row[4] for row in cells]
    if any(block.summed_whole for block in program.blocks):
        lines += _paragraphs("  ", "* some float64 gradients, which the model sums in a narrower dtype, over the whole batch")
    return [*_paragraphs("", _title(number, program)), *lines]


def _how(block: Block, segment: Any, notes: dict[str, int], is_most: bool) -> str:
    count = segment.micro_batches
    most = "up to " * (is_most and count > 1)
    how = (
        f"{most}{count} micro-batch" + "es" * (count != 1) if block.inner_looped else f"whole batch [{notes[block.reason or '']}]"
    )
    return how + " *" * bool(block.summed_whole)


def _cropped(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    left = (width - 1) // 2
    return f"{name[:left]}…{name[len(name) - (width - 1 - left) :]}"


def _title(number: int, program: Program) -> str:
    title = f"program {number}: {len(program.segments)} segments, instances of {len(program.blocks)} blocks"
    if program.captured.why_static:
        title += f"; not split: {program.captured.why_static}"
    places = {i.name: program.captured.specs[i.node].batch for i in program.captured.inputs if i.kind == "value"}
    return title + "".join(
        f"; '{name}' has the batch in dimension {place.dim}" for name, place in places.items() if place and place.dim
    )
