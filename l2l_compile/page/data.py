"""The content of the page, as numbers and texts for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..host.memory import host_memory
from ..ir.program import Program
from ..options import Options
from ..runtime.dry_run import device_memory
from ..timeline import ORDER, Timeline
from ..units import format_bytes
from .memory import Curve, device_curve, host_curve

_US = 1e6


def data_of(report: Any, timeline: Timeline | None, title: str) -> dict[str, Any]:
    """The content of the page of a `Report`. `title` says whether its timeline was measured or simulated."""
    programs, options = report.programs, report.options
    curves: dict[str, Any] = {}
    if timeline is not None:
        curves["device"] = _curve(device_curve(programs, options, timeline))
        curves["host"] = _curve(host_curve(programs, report.host_memory, options, timeline))
    return {
        "title": title,
        "figures": _figures(report, timeline),
        "warnings": _warnings(report),
        "segments": [_segment(s, number) for number, program in enumerate(programs) for s in program.segments],
        "timeline": _timeline(timeline) if timeline is not None else None,
        "memory": curves,
        "options": _options(report),
        "text": str(report),
    }


def _figures(report: Any, timeline: Timeline | None) -> list[list[str]]:
    segments = [s for p in report.programs for s in p.segments]
    whole = sum(not s.block.inner_looped for s in segments)
    found = [["seconds a step", f"{timeline.seconds:.4g}"]] if timeline is not None else []
    return [
        *found,
        ["device memory at its peak", format_bytes(report.device_memory.peak)],
        ["host memory without stashes", format_bytes(report.host_memory.total)],
        [f"segments, of {len(report.blocks)} kinds (blocks)", f"{len(segments)}"],
        ["whole batch at once", f"{whole} of {len(segments)} segments" if whole else "none"],
        ["outputs copied in every step", format_bytes(sum(o.bytes for o in report.outputs))],
    ]


def _warnings(report: Any) -> list[str]:
    found = [f"graph break: {reason}" for reason in report.graph_breaks]
    found += [f"runs uncompiled, on the host: {what}" for what in report.uncompiled]
    found += [str(uncut) for uncut in report.uncut]
    found += [f"grows with depth: {what}" for what in report.device_memory.grows]
    return list(dict.fromkeys(found))


def _segment(segment: Any, program: int) -> dict[str, Any]:
    block = segment.block
    how = f"{segment.micro_batches} micro-batches" if block.inner_looped else f"whole batch: {block.reason}"
    return {
        "name": segment.name,
        "block": f"{program}.{block.name}",
        "repeats": block.repeats,
        "bytes": segment.parameter_bytes,
        "how": how,
        "whole": not block.inner_looped,
        "program": program,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """The pieces of the lanes that have work, in microseconds. Each label is listed once; pieces refer to labels by number."""
    at_work = {piece.lane for piece in timeline.pieces}
    lanes = [lane for lane in ORDER if lane in at_work]
    labels: dict[str, int] = {}
    pieces = []
    for piece in timeline.pieces:
        texts = (piece.label, piece.waited_for)
        label, waited_for = (labels.setdefault(text, len(labels)) for text in texts)
        start = round((piece.start - timeline.start) * _US, 2)
        pieces.append([lanes.index(piece.lane), start, round(piece.seconds * _US, 2), label, waited_for])
    busy = [round(timeline.busy(lane) / timeline.seconds, 4) for lane in lanes]
    return {"lanes": lanes, "end": timeline.seconds * _US, "labels": list(labels), "pieces": pieces, "busy": busy}


def _curve(curve: Curve) -> dict[str, Any]:
    return {"kinds": list(curve.kinds), "times": [round(t * _US, 2) for t in curve.times], "bytes": curve.bytes}


def _options(report: Any) -> list[list[str]]:
    """Each option with its value, and the effect of another value."""
    options, changes = report.options, _changes(report.programs, report.options)
    shown = [f.name for f in fields(Options) if f.name not in ("optimizer", "passes", "device", "accumulate")]
    values = {name: str(getattr(options, name)) for name in shown}
    values["optimizer"] = type(options.optimizer).__name__ if options.optimizer is not None else "None"
    return [[name, value, changes.get(name, "")] for name, value in values.items()]


def _changes(programs: Sequence[Program], options: Options) -> dict[str, str]:
    rows = max((p.bindings.get(p.captured.batch, 1) for p in programs), default=1)
    layer = max((s.block.weight_bytes(p.bindings) for p in programs for s in p.segments if s.block.repeats > 1), default=0)
    changes = {"prefetch": f"one more: about {format_bytes(layer)} of weights more on the device"}
    more = min(2 * options.micro_batches, rows)
    if 1 < options.micro_batches < more:
        changes["micro_batches"] = (
            f"{more}: {_device(programs, replace(options, micro_batches=more))} of device memory at its peak"
        )
    if options.stash == "host":
        changes["stash"] = '"device": what forward keeps stays on the device, and no copy of it crosses the link'
    if options.precision == "fp32":
        changes["precision"] = '"bf16": half of the bytes on the link, and 2 bytes more for each parameter on the host'
    if options.outputs == "all":
        changes["outputs"] = '"loss": outputs with rows of the batch are not copied to the host'
    if options.optimizer is not None and options.precision != "fp16":
        others = [u for u in ("at_step", "in_backward", "in_forward") if u != options.update]
        clip = replace(options, max_grad_norm=None)
        changes["update"] = "; ".join(
            f'"{u}": {format_bytes(host_memory(programs, replace(clip, update=u)).total)} of host memory' for u in others
        )
    return changes


def _device(programs: Sequence[Program], options: Options) -> str:
    return format_bytes(device_memory(programs, options).peak)
