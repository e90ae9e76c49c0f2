"""Rows as a table, worst first, each with its expected value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .rows import VERDICTS, Row

WIDTHS = {"verdict": 12, "stage": 8, "case": 44, "figure": 34, "value": 26}
MOST_FINE = 10  # rows within their limits that are shown for each stage; the JSON has all rows


def shown(row: Row) -> str:
    """A row as a line."""
    cells = {"verdict": row.verdict, "stage": row.stage, "case": row.case, "figure": row.figure, "value": value_of(row)}
    line = " ".join(cell.ljust(WIDTHS[name]) for name, cell in cells.items())
    return f"{line} {row.should}".rstrip() + (f"\n{'':13}{row.note}" if row.note and row.is_bad else "")


def value_of(row: Row) -> str:
    if row.value is None:
        return "-"
    text = (
        f"{row.value:,.4g}"
        if isinstance(row.value, float)
        else f"{row.value:,}"
        if isinstance(row.value, int)
        else str(row.value)
    )
    return f"{text} {row.unit}".rstrip()


def table(rows: Sequence[Row]) -> str:
    """Rows worst first: failures, missing rows, measured rows; then, of rows within their limits, the nearest to a limit."""
    lines = [shown(Row("stage", "case", "figure", "value", "", "should be", "verdict"))]
    fine: Counter[str] = Counter()
    for row in sorted(rows, key=Row.order):
        if row.verdict == "ok":
            fine[row.stage] += 1
            if fine[row.stage] > MOST_FINE:
                continue
        lines.append(shown(row))
    lines += [
        f"... and {count - MOST_FINE} more of {stage} within their limits" for stage, count in fine.items() if count > MOST_FINE
    ]
    counts = Counter(row.verdict for row in rows)
    lines.append(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    return "\n".join(lines)
