"""All stages: their shares of the time, and one JSON file that is valid at every moment."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .checkout import ROOT
from .processes import Process, Stage, processes_of, run_stage
from .rows import Row, plain

START = 4.0  # seconds in addition to its share, in which a process begins
RESERVE = 4.0  # seconds to kill processes that do not end, and for the table
EVERY = 2.0  # seconds between writes while a stage runs

_STATUSES = ("crash", "hang", "out of time", "done")


@dataclass
class Record:
    """The results so far, and the path of their file. `stages` maps a name to its status, times and rows."""

    path: Path
    minutes: float
    stages: dict[str, dict] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    commit: str | None = field(default_factory=lambda: _commit())

    @property
    def rows(self) -> list[Row]:
        return [row for stage in self.stages.values() for row in stage["rows"]]

    def fact(self, figure: str) -> str | float | None:
        """A figure of the stage `machine`."""
        rows = self.stages.get("machine", {}).get("rows", ())
        return next((row.value for row in rows if row.figure == figure), None)

    def save(self) -> None:
        """Write another file and rename it: a reader finds either the old content or the new content."""
        content = {
            "benchmark": "gpu",
            "date": self.date,
            "minutes": self.minutes,
            "commit": self.commit,
            "machine": {row.figure: row.value for row in self.stages.get("machine", {}).get("rows", ())},
            "stages": {
                name: {**{k: v for k, v in stage.items() if k != "rows"}, "rows": [asdict(row) for row in stage["rows"]]}
                for name, stage in self.stages.items()
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(plain(content), indent=1) + "\n")
        os.replace(beside, self.path)

    def move(self, path: Path) -> None:
        """Give the file another name, from now on."""
        old, self.path = self.path, path
        self.save()
        old.unlink(missing_ok=True)


def share(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """Seconds for a stage, out of the seconds `left` for this stage and all `later` ones.

    Each stage gets a fixed time for the start of its process. The rest is divided in proportion to the stages' shares, so time
    that a stage does not need goes to the later stages.
    """
    starts = START * (1 + len(later))
    if left <= starts:
        return left / (1 + len(later))
    return START + (left - starts) * stage.seconds / sum(each.seconds for each in (stage, *later))


def run_stages(
    stages: Sequence[Stage],
    seconds: float,
    record: Record,
    heard: Callable[[Row], None] = lambda row: None,
    ended: Callable[[str, Record], None] = lambda name, record: None,
) -> None:
    """Run stages one after the other, all within `seconds`. The record is written during and after each stage.

    heard, ended   called with each row; called with the name of a finished stage and the record
    """
    end = time.time() + seconds - RESERVE
    record.stages = {stage.name: {"status": "not started", "rows": []} for stage in stages}
    record.save()
    with tempfile.TemporaryDirectory(prefix="gpu-stages-") as folder, contextlib.ExitStack() as at_end:
        at_end.callback(record.save)

        def prepared(index: int) -> list[Process]:
            found = processes_of(stages[index], Path(folder)) if index < len(stages) else []
            for process in found:
                at_end.callback(process.stop)
            return found

        coming = prepared(0)
        for index, stage in enumerate(stages):
            start, processes, coming = time.time(), coming, prepared(index + 1)
            allotted = share(stage, stages[index + 1 :], max(end - start, 0.0))
            entry = record.stages[stage.name]
            entry.update(status="running", allotted=round(allotted, 1))
            run_stage(processes, start + allotted, _listener(record, entry, heard))
            entry.update(_outcome(processes), seconds=round(time.time() - start, 1))
            record.save()
            ended(stage.name, record)


def _listener(record: Record, entry: dict, heard: Callable[[Row], None]) -> Callable[[Sequence[Row]], None]:
    """A function that records rows as they come, and writes the file at most every `EVERY` seconds."""
    saved = time.time()

    def listen(rows: Sequence[Row]) -> None:
        nonlocal saved
        entry["rows"] += rows
        for row in rows:
            heard(row)
        if rows and time.time() - saved > EVERY:
            saved = time.time()
            record.save()

    return listen


def _outcome(processes: Sequence[Process]) -> dict:
    """The worst status of the processes, the number of their starts, and the end of their output."""
    tails = [process.tail for process in processes if process.status != "done" and process.tail.strip()]
    return {
        "status": min((process.status for process in processes), key=_STATUSES.index),
        "starts": sum(process.starts for process in processes),
        "output": "\n".join(tails)[-4000:],
    }


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
