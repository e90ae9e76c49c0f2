"""One figure of a stage: its value, its expected value, and a verdict. Rows are sent as JSON lines, written at once."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# worst first
VERDICTS = ("crash", "hang", "error", "off", "out of time", "not reached", "skipped", "needs a GPU", "measured", "ok")
BAD = VERDICTS[:4]
HOST_GB = "GPU_STAGES_HOST_GB"  # environment variable: host memory in GB, if the system's figure is wrong
TRACES = "GPU_STAGES_TRACES"  # environment variable: the folder for Chrome traces of measured steps
RESTART = 75  # exit status of a process whose remaining cases need a new process


@dataclass(frozen=True)
class Row:
    """A figure.

    should    the expected value, in words
    verdict   one of `VERDICTS`; "off" is a figure beyond its limit, "measured" one that has no limit
    badness   within one verdict, larger is worse: the value over its limit
    note      details for the reader: the error and where it was raised, or the compared tensor
    """

    stage: str
    case: str
    figure: str
    value: float | str | None
    unit: str = ""
    should: str = ""
    verdict: str = "measured"
    badness: float = 0.0
    note: str = ""

    @staticmethod
    def limited(
        stage: str,
        case: str,
        figure: str,
        value: float,
        unit: str = "",
        *,
        most: float | None = None,
        least: float | None = None,
        should: str = "",
        note: str = "",
    ) -> Row:
        """A figure with an upper or a lower limit. NaN is off."""
        if most is None and least is None:
            return Row(stage, case, figure, value, unit, should, note=note)
        if most is not None:
            badness, words = (value / most if most else float(value > 0) * 2), f"at most {most:g}"
        else:
            badness, words = (least / value if value > 0 else math.inf), f"at least {least:g}"
        if math.isnan(value):
            badness = math.inf
        verdict = "ok" if badness <= 1 else "off"
        return Row(stage, case, figure, value, unit, should or words, verdict, badness, note)

    @property
    def is_bad(self) -> bool:
        return self.verdict in BAD

    def order(self) -> tuple[int, float]:
        """Sorts rows worst first."""
        return VERDICTS.index(self.verdict), -self.badness


class Journal:
    """A file of JSON lines, one for each fact: the plan, the begin and the end of a case, a row. `write` writes at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, content: Any) -> None:
        self._file.write(json.dumps({kind: plain(content)}) + "\n")
        self._file.flush()

    def row(self, row: Row) -> None:
        self.write("row", asdict(row))


def read_journal(path: Path) -> list[tuple[str, Any]]:
    """The facts of a journal, in order. Incomplete lines are left out."""
    if not path.exists():
        return []
    facts = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            ((kind, content),) = json.loads(line).items()
        except (ValueError, AttributeError):
            continue
        facts.append((kind, _row(content) if kind == "row" else content))
    return facts


def _row(content: dict[str, Any]) -> Row:
    """The row of a journal. Undoes `plain` for the number by which rows are sorted."""
    return Row(**{**content, "badness": float(content.get("badness", 0.0))})


def plain(content: Any) -> Any:
    """The content for JSON: numbers that JSON lacks (NaN, infinity) become strings."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
