"""The table of `coverage.py` as Markdown."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers

Result = dict[str, Any]

SPLIT = "layers"  # of a stack that is streamed layer by layer
FAILURES = {
    "differs": "Silently wrong",
    "refused": "Refused",
    "crash": "Another exception",
    "hang": "No result in time",
    "death": "The process ended",
    "Dynamo fails": 'Not trained by `torch.compile(backend="eager")` either',
    "random": "Random: another seed gives another eager step",
    "eager fails": "No tiny model of it trains eagerly",
}
WHOLE = """\
Of a cross entropy (`nll_loss_forward`) this is the sum over the targets, of one number each: the scores and these numbers are
made micro-batch by micro-batch."""
CLASSES = """\
## All classes

`repeats`: of the block with the most. `stacks`: lists of layers that are streamed layer by layer. `whole batch`: what
decided so where a segment that reads batched values is not split into micro-batches.

| class | task | dtype | result | graphs | repeats | stacks | whole batch | worst error |
|---|---|---|---|---|---|---|---|---|"""


def verdict(row: Result) -> str:
    """The status in the table: not ours where `torch.compile(backend="eager")` does not train the class either."""
    if row["status"] in ("parity", "random", "eager fails") or row.get("dynamo", "parity") == "parity":
        return row["status"]
    return "Dynamo fails"


def table(rows: list[Result]) -> str:
    """The results as Markdown: figures, failures by reason, what runs whole-batch, and a line for each class."""
    rows = sorted(rows, key=lambda row: row["name"].lower())
    lines = [
        "# Coverage", "",
        f"One training step of a tiny model of each class: torch {torch.__version__}, transformers {transformers.__version__}.",
        "Made by `python examples/coverage.py`, which tells what is compared.", "",
        "| model classes | |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in figures(rows).items()), "",
    ]
    for status, title in FAILURES.items():
        failed = [row for row in rows if verdict(row) == status]
        if failed:
            lines += [f"## {title} ({len(failed)})", ""]
            lines += [f"- {', '.join(names)}: {reason}" for reason, names in grouped((r["reason"], r["name"]) for r in failed)] + [""]
    lines += ["## What runs whole-batch", "", WHOLE, "", "| why | classes | such as |", "|---|---|---|"]
    whole = grouped((reason, row["name"]) for row in rows for reason in row.get("whole", ()))
    lines += [f"| {reason} | {len(names)} | {', '.join(names[:3])} |" for reason, names in whole]
    return "\n".join([*lines, "", CLASSES, *map(line, rows)]) + "\n"


def figures(rows: list[Result]) -> dict[str, str]:
    """The summary: what was tried, what trains, what is found."""
    kinds = Counter(map(verdict, rows))
    eager = len(rows) - kinds["eager fails"] - kinds["random"]
    dynamo = eager - kinds["Dynamo fails"]
    compiled = [row for row in rows if "programs" in row]
    stacks = [set(row["stacks"].values()) for row in compiled if row["stacks"]]
    return {
        "attempted": str(len(rows)),
        "trained by eager, besides those that are random": str(eager),
        'of these, trained by `torch.compile(backend="eager")`': str(dynamo),
        "**of these, parity with l2l**": share(kinds["parity"], dynamo),
        "silently wrong": str(kinds["differs"]),
        "captured in one graph, of those that l2l compiled": share(sum(row["programs"] == 1 for row in compiled), len(compiled)),
        "every stack streamed layer by layer, of those with stacks": share(sum(found == {SPLIT} for found in stacks), len(stacks)),
    }


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.1f} %)"


def grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Names by reason, the most frequent reason first."""
    names = defaultdict(list)
    for reason, name in pairs:
        names[escaped(reason)].append(name)
    yield from sorted(names.items(), key=lambda item: -len(item[1]))


def line(row: Result) -> str:
    """The line of a class in the last table."""
    cells = [row["name"], row["task"], row.get("dtype", ""), verdict(row)]
    if "programs" in row:
        found = sum(state == SPLIT for state in row["stacks"].values())
        whole = ", ".join(reason.split()[0] if reason.startswith("aten.") else escaped(reason) for reason in row["whole"])
        cells += [str(row["programs"]), f"×{row['repeats']}", f"{found} of {len(row['stacks'])}", whole, f"{row['error']:.1e}"]
    return f"| {' | '.join(cells + [''] * (9 - len(cells)))} |"


def escaped(text: str) -> str:
    for character in "|<*_":
        text = text.replace(character, "\\" + character)
    return text
