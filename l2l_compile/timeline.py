"""The timeline of work on the lanes of a device and on the threads of the host, measured or simulated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from l2l_compile.lanes import AT_WORK

_US = 1e6  # microseconds a second: the unit of a Chrome trace


@dataclass(frozen=True)
class Span:
    """A piece of work of a lane or a thread.

    lane       "compute", "h2d", "d2h", "comm"; "caller" is the thread of the training loop, "host" the thread of gradients
               and updates, "update" the thread of updates that are one step late
    label      the node that the span executes, with its segment and micro-batch
    start, end seconds since the timeline began
    waited_for the work whose end the span had to wait for, "" if its lane was busy until the span began
    """

    lane: str
    label: str
    start: float
    end: float
    waited_for: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Gap:
    """A time in which a lane was idle between two spans of its work: `before` the second, which waited for `waited_for`."""

    lane: str
    start: float
    end: float
    before: str
    waited_for: str

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.3g} ms before {self.before}, which waits for {self.waited_for or 'nothing'}"


@dataclass(frozen=True)
class Timeline:
    """Pieces of work from `start` to `end` in seconds, for example a step. The spans of a lane are in order."""

    start: float
    end: float
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def of(self, lane: str) -> list[Span]:
        """The spans of a lane, in their order."""
        return [span for span in self.spans if span.lane == lane]

    def busy(self, lane: str) -> float:
        """Seconds in which a lane is at work."""
        return sum(span.seconds for span in self.of(lane))

    def gaps(self, lane: str) -> list[Gap]:
        """The gaps of a lane between its first and its last piece of work, the longest first."""
        found = [
            Gap(lane, a.end, b.start, b.label, b.waited_for) for a, b in itertools.pairwise(self.of(lane)) if b.start > a.end
        ]
        return sorted(found, key=lambda gap: -gap.seconds)

    def between(self, start: float, end: float) -> Timeline:
        """The part of the timeline between two times; spans are cut at its ends."""
        inside = (p for p in self.spans if p.end > start and p.start < end)
        cut = (Span(p.lane, p.label, max(p.start, start), min(p.end, end), p.waited_for) for p in inside)
        return Timeline(start, end, tuple(cut))

    def save(self, path: str | Path, name: str = "l2l") -> None:
        """Write the timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open. Times begin at 0."""
        content = {"traceEvents": list(self.events(name)), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(content))

    def events(self, name: str, process: int = 0) -> Iterator[dict]:
        """The events of a Chrome trace, as one process with a thread for each lane."""
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for number, lane in enumerate(AT_WORK):
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}
        for span in self.spans:
            event = {"ph": "X", "name": span.label, "cat": span.lane, "pid": process, "tid": AT_WORK.index(span.lane)}
            event |= {"ts": (span.start - self.start) * _US, "dur": span.seconds * _US}
            yield event | ({"args": {"waited for": span.waited_for}} if span.waited_for else {})


def save_together(timelines: dict[str, Timeline], path: str | Path) -> None:
    """Write several timelines, such as a measured and a simulated one, into one Chrome trace, one above the other."""
    events: Iterable[dict] = itertools.chain.from_iterable(
        timeline.events(name, number) for number, (name, timeline) in enumerate(timelines.items())
    )
    Path(path).write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))
