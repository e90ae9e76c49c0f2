"""A comparison as text: a sentence for each failure, and a table."""

from __future__ import annotations

from collections.abc import Iterator

from l2l_compile.testing.difference import GRADIENT, LOSS, Difference
from l2l_compile.testing.verdicts import DEPENDS, Verdict, Verdicts

SHOWN = 12  # rows of a table, and sentences of an error


def summary(comparison: Verdicts) -> str:
    count, found = len(comparison.differences), len(comparison.failures)
    return f"{comparison.title}: " + (f"{found} of {count} tensors differ" if found else f"equal in all of {count} tensors")


def message(comparison: Verdicts) -> str:
    """A sentence for each failure, and the first segment of backward in which a gradient differs."""
    lines = [summary(comparison), *(f"  {_sentence(comparison, verdict)}" for verdict in comparison.failures[:SHOWN])]
    more = len(comparison.failures) - SHOWN
    lines += [f"  ... and {more} more"] if more > 0 else []
    gradients = [v.difference for v in comparison.failures if v.difference.key.kind == GRADIENT and v.difference.segments]
    if len(gradients) > 1:
        order = [segment.name for program in comparison.programs for segment in program.segments]
        last = max(gradients, key=lambda d: max(map(order.index, d.segments)))
        lines.append(f"  backward reaches segment {last.place!r} first of those whose gradients differ")
    return "\n".join(lines)


def _sentence(comparison: Verdicts, verdict: Verdict) -> str:
    difference = verdict.difference
    if difference.problem is not None:
        return f"{difference} {difference.problem}"
    error, allowed = _relative(difference.error, difference), _relative(verdict.allowed, difference)
    how = f"is off by {error}, {allowed} is allowed"
    if verdict.is_zero:
        how = f"is zero but for rounding in eager ({difference.norm:.1e}): it is off by {difference.error:.1e}, {verdict.allowed:.1e} is allowed"
    if not comparison.rule.beside:
        return f"{difference} {how}"
    own = (comparison.own.why or DEPENDS) if verdict.own is None else _relative(verdict.own, difference)
    return f"{difference} {how}; {comparison.rule.beside}: {own}"


def table(comparison: Verdicts, rows: int | None) -> str:
    """The loss and the largest relative errors, beside the error of eager itself: `rows` rows, or all with None."""
    order = sorted(comparison.ordered(), key=lambda verdict: verdict.difference.key.kind != LOSS)
    beside = comparison.rule.beside
    lines = [("", "segment", "error", beside, "allowed"), *(tuple(_cells(comparison, verdict)) for verdict in order[:rows])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if rows is not None and len(order) > rows:
        text.append(_rest(order[rows:]))
    if comparison.own.why is not None:
        text.append(f"{beside}: {comparison.own.why}")
    return "\n".join(text)


def _cells(comparison: Verdicts, verdict: Verdict) -> Iterator[str]:
    difference = verdict.difference
    mark = "" if verdict.passes else "  differs"
    yield str(difference.key)
    yield difference.place
    if difference.problem is not None:
        yield from (difference.problem, "", mark.strip())
    elif verdict.is_zero:
        yield from (f"{difference.error:.1e}", "zero but for rounding", f"{verdict.allowed:.1e}{mark}")
    else:
        yield _relative(difference.error, difference)
        yield _relative(verdict.own, difference) if verdict.own is not None else ""
        yield _relative(verdict.allowed, difference) + mark if difference in comparison.differences else ""


def _rest(verdicts: list[Verdict]) -> str:
    zeros, errors = sum(v.is_zero for v in verdicts), [v.difference.relative for v in verdicts if not v.is_zero]
    told = [f"... and {len(verdicts)} more"]
    told += [f"with errors up to {max(errors):.1e}"] if errors else []
    told += [f"{zeros} of them zero but for rounding"] if zeros else []
    return ", ".join(told)


def _relative(error: float, difference: Difference) -> str:
    return f"{error / difference.norm:.1e}" if difference.norm else f"{error:.1e}"
