"""Figures from the timeline of one step: the idle time of compute, its longest gaps, and the speed of each copy lane."""

from __future__ import annotations

from l2l_compile.runtime.stats import Stats
from l2l_compile.timeline import Span, Timeline

from .cases import Report

LONGEST = 6  # gaps that are named


def tell_lanes(timeline: Timeline, stats: Stats, report: Report) -> None:
    """Rows for the idle time of compute, its longest gaps, and GB/s of the copy lanes while they are at work."""
    busy, gaps = timeline.busy("compute"), timeline.gaps("compute")
    idle = sum(gap.seconds for gap in gaps)
    report.fact("compute at work", busy, "s")
    report.fact("compute idle between spans", idle, "s", should="near 0: copies and updates are hidden")
    report.fact("idle, of the step", idle / max(busy + idle, 1e-12), "", should="below 0.05")
    for number, gap in enumerate(gaps[:LONGEST], 1):
        report.fact(f"gap {number}", gap.seconds * 1e3, "ms", note=f"before {gap.before}, which waits for {gap.waited_for}")
        report.fact(f"gap {number} is before", f"{gap.before} | waits for {gap.waited_for}")
    moved = {"h2d": stats.fetched_bytes + stats.restored_bytes, "d2h": stats.pushed_bytes + stats.offloaded_bytes}
    for lane, count in moved.items():
        seconds = timeline.busy(lane)
        report.fact(f"{lane}: bytes", count)
        should = "that of pinned copies (stage copies), less casts on the host and waits for compute"
        report.fact(f"{lane}: while at work", count / max(seconds, 1e-12) / 1e9, "GB/s", should=should)
    for name, seconds in by_kind(timeline.of("compute")).items():
        report.fact(f"compute in {name}", seconds, "s")


def by_kind(spans: list[Span]) -> dict[str, float]:
    """Seconds of all spans of each kind of node."""
    found: dict[str, float] = {}
    for span in spans:
        kind = span.label.split(" ")[0]
        found[kind] = found.get(kind, 0.0) + span.seconds
    return found
