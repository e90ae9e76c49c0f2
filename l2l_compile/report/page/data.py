"""The content of the page, as numbers and texts for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from l2l_compile.estimate.device_memory import device_memory
from l2l_compile.estimate.host_memory import host_memory
from l2l_compile.ir.program import Program
from l2l_compile.lanes import AT_WORK, Lane
from l2l_compile.options import Options
from l2l_compile.report.page.memory_curve import Curve, device_curve, host_curve
from l2l_compile.timeline import Timeline
from l2l_compile.units import format_bytes, format_count
from l2l_compile.update_modes import MODES

_US = 1e6


def data_of(report: Any, timeline: Timeline | None, title: str, stages: Sequence[Timeline] = ()) -> dict[str, Any]:
    """The content of the page of a `Report`. `title` says whether its timeline was measured or simulated.

    Below the lanes of this rank, the page shows what all ranks of a pipeline compute, send and receive: `stages` are their timelines.
    """
    programs, options = report.programs, report.options
    curves: dict[str, Any] = {}
    if timeline is not None:
        curve = device_curve(programs, options, timeline, report.machine, report.levels)
        curves["device"] = _curve(curve, report.device_memory.peak)
        curves["host"] = _curve(host_curve(programs, report.host_memory, options, timeline), report.host_memory.total)
    limits = limits_of(report)
    return {
        "title": title,
        "about": _about(report),
        "verdict": _verdict(limits),
        "figures": _figures(report, timeline),
        "warnings": _warnings(report),
        "segments": [_segment(s, number) for number, program in enumerate(programs) for s in program.segments],
        "timeline": _timeline(timeline, options, stages) if timeline is not None else None,
        "memory": curves,
        "limits": {limit.name: {"bytes": limit.room, "text": limit.text, "fits": limit.fits} for limit in limits},
        "options": _options(report),
        "text": str(report),
    }


@dataclass(frozen=True)
class Limit:
    """The memory of a machine that tensors may have, and the memory that a step needs.

    name   "device" or "host"
    needs  bytes at the peak, as in the report
    room   bytes
    text   the room, with the reserve that is taken off
    """

    name: str
    needs: int
    room: int
    text: str

    @property
    def fits(self) -> bool:
        return self.needs <= self.room

    def __str__(self) -> str:
        return f"{self.name} memory {format_bytes(self.needs)} of {format_bytes(self.room)}"


def limits_of(report: Any) -> list[Limit]:
    """The limits of the report's machine; none without a machine."""
    machine = report.machine
    if machine is None:
        return []
    device, host = machine.device_room, machine.host_room
    return [
        Limit("device", report.device_memory.peak, device, _room_of(device, machine.device_reserve, "driver and context")),
        Limit("host", report.host_memory.total, host, _room_of(host, machine.host_reserve, "the system")),
    ]


def _room_of(room: int, reserve: float, owner: str) -> str:
    if format_bytes(room) == format_bytes(int(room + reserve)):
        return format_bytes(room)
    return f"{format_bytes(room)}: {format_bytes(int(room + reserve))} less {format_bytes(int(reserve))} for {owner}"


def _about(report: Any) -> str:
    """The model, its size, the batch and the machine."""
    rows, tokens = rows_of(report.programs), report.tokens
    batch = f"a batch of {rows:,} row{'s' * (rows != 1)}" + (f" with {tokens:,} tokens" if tokens is not None else "")
    what = [*([report.model] if report.model else []), f"{format_count(report.host_memory.parameters)} parameters", batch]
    return ", ".join(what) + (f"; on {report.machine.name}" if report.machine is not None else "")


def _verdict(limits: Sequence[Limit]) -> dict[str, Any] | None:
    """Whether the step fits on the machine; None without a machine."""
    if not limits:
        return None
    fits = all(limit.fits for limit in limits)
    return {"fits": fits, "text": f"{'fits' if fits else 'does not fit'}: {', '.join(map(str, limits))}"}


def rows_of(programs: Sequence[Program]) -> int:
    """The rows of the batch."""
    return max((p.bindings.get(p.captured.batch, 1) for p in programs), default=1)


def _steps_in(timeline: Timeline, programs: Sequence[Program]) -> int:
    """The number of steps in a timeline: how often it has the first forward, at least 1."""
    first = {f"forward {p.segments[0].name}" for p in programs if p.segments}
    counts = Counter((p.lane, p.label) for p in timeline.spans if p.label.removesuffix(", micro-batch 1") in first)
    return max(counts.values(), default=1)


def _rate(report: Any, seconds: float) -> tuple[str, str]:
    """The name and the text of the rate of all ranks: tokens a second, or samples a second without tokens."""
    ranks = max((p.captured.shards for p in report.programs), default=1)
    count, name = (report.tokens, "tokens/s") if report.tokens is not None else (rows_of(report.programs), "samples/s")
    rate = ranks * count / seconds
    return name, f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _figures(report: Any, timeline: Timeline | None) -> list[list[str]]:
    segments = [s for p in report.programs for s in p.segments]
    whole = sum(not s.block.inner_looped for s in segments)
    found = []
    if timeline is not None:
        seconds = timeline.seconds / _steps_in(timeline, report.programs)
        name, rate = _rate(report, seconds)
        found = [[name, rate], ["seconds a step", f"{seconds:.4g}"]]
    return [
        *found,
        ["device memory at its peak", format_bytes(report.device_memory.peak)],
        ["host memory at its peak", format_bytes(report.host_memory.total)],
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


def _timeline(timeline: Timeline, options: Options, stages: Sequence[Timeline]) -> dict[str, Any]:
    """The spans of the lanes that have work, in microseconds. Each label is listed once; spans refer to labels by number."""
    lanes = _lanes(timeline, options, stages)
    labels: dict[str, int] = {}
    spans = []
    for row, (_, _, lane, of) in enumerate(lanes):
        for span in of.of(lane):
            label, waited_for = (labels.setdefault(text, len(labels)) for text in (span.label, span.waited_for))
            spans.append([row, round((span.start - of.start) * _US, 2), round(span.seconds * _US, 2), label, waited_for])
    return {
        "lanes": [name for name, _, _, _ in lanes],
        "about": [about for _, about, _, _ in lanes],
        "end": timeline.seconds * _US,
        "labels": list(labels),
        "spans": sorted(spans, key=lambda span: span[1]),
        "busy": [_share(of.busy(lane) / of.seconds) for _, _, lane, of in lanes],
    }


def _lanes(timeline: Timeline, options: Options, stages: Sequence[Timeline]) -> list[tuple[str, str, str, Timeline]]:
    """The lanes of the picture: the name, what it is, the lane and its timeline."""
    at_work = {span.lane for span in timeline.spans}
    texts = lane_texts(options, host_computes=Lane.COMPUTE not in at_work)
    lanes: list[tuple[str, str, str, Timeline]] = [(lane, texts[lane], lane, timeline) for lane in AT_WORK if lane in at_work]
    for rank, stage in enumerate(stages):
        there = {span.lane for span in stage.spans}
        computes = Lane.COMPUTE if Lane.COMPUTE in there else Lane.CALLER
        shown = (lane for lane in (computes, Lane.SEND, Lane.RECV) if lane in there)
        lanes += [(f"{rank} {lane}", f"rank {rank}: {lane.work}", lane, stage) for lane in shown]
    return lanes


def _share(share: float) -> str:
    """0.94 -> "94 %", 0.004 -> "0.4 %"."""
    if share >= 0.01 or share == 0:
        return f"{share:.0%}".replace("%", " %")
    return f"{share:.1%}".replace("%", " %") if share >= 0.001 else "< 0.1 %"


def lane_texts(options: Options, host_computes: bool = False) -> dict[str, str]:
    """The meaning of each lane with these options. `host_computes`: the host is the device, so the caller computes."""
    stashes = options.stash != "device"
    caller = "the thread of the training loop"
    if host_computes:
        caller += ", which also computes the layers: the host is the device"
    if not options.mode.is_overlapped:
        caller += "; optimizer.step() runs here"
    return {
        Lane.CALLER: caller,
        Lane.COMPUTE: "layers, on the device",
        Lane.H2D: "copies to the device: weights" + (", and stashes for backward" if stashes else ""),
        Lane.D2H: "copies to the host: gradients" + (", and stashes of forward" if stashes else "") + ", and outputs",
        **{lane: lane.work for lane in (Lane.COMM, Lane.SEND, Lane.RECV, Lane.DISK_READ, Lane.DISK_WRITE)},
        Lane.HOST: _host_text(options),
        Lane.UPDATE: "a second thread of the host: updates of the step before, while this step computes",
    }


def _host_text(options: Options) -> str:
    work = "takes gradients from the link; updates have a lane of their own" if options.delay else options.mode.host_work
    return f"a thread of the host: {work}"


def _curve(curve: Curve, counted: int) -> dict[str, Any]:
    """A curve, and the peak that the report counts."""
    times = [round(t * _US, 2) for t in curve.times]
    return {"kinds": list(curve.kinds), "times": times, "bytes": curve.bytes, "counted": counted}


def _options(report: Any) -> list[list[str]]:
    """Each option with its value, and the effect of another value."""
    options, changes = report.options, _changes(report.programs, report.options, report.host_memory.activations)
    shown = [f.name for f in fields(Options) if f.name not in ("optimizer", "passes", "device", "accumulate")]
    values = {name: str(getattr(options, name)) for name in shown}
    values["optimizer"] = type(options.optimizer).__name__ if options.optimizer is not None else "None"
    return [[name, value, changes.get(name, "")] for name, value in values.items()]


def _changes(programs: Sequence[Program], options: Options, activations: int) -> dict[str, str]:
    rows = rows_of(programs)
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
        others = [mode for mode in MODES if mode != options.update]
        clip = replace(options, max_grad_norm=None)
        changes["update"] = "; ".join(
            f'"{u}": {format_bytes(host_memory(programs, replace(clip, update=u), activations).total)} of host memory'
            for u in others
        )
    return changes


def _device(programs: Sequence[Program], options: Options) -> str:
    return format_bytes(device_memory(programs, options).peak)
