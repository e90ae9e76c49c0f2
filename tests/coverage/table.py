"""The table of coverage as Markdown."""

from __future__ import annotations

import importlib.metadata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Result = dict[str, Any]

SPLIT = "layers"  # the stack is streamed layer by layer
ACROSS = "layers, cut inside"  # each segment of the stack is at most as large as a layer, but some hold parts of two
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

- `repeats`: of the block with the most.
- `stacks`: lists of layers that are streamed layer by layer: no segment holds more weights of the list than its largest layer does.
- `largest`: the weights in the segment that holds most of a stack, where those of the largest layer are 1.
- `blocks`, `peak`: of this model, and of one with the layers in brackets: blocks, and peak device memory relative to this model.
- `whole batch`: what decided so where a segment that reads batched values is not split into micro-batches."""
COLUMNS = (
    "class",
    "task",
    "dtype",
    "result",
    "graphs",
    "repeats",
    "stacks",
    "largest",
    "layers",
    "blocks",
    "peak",
    "whole batch",
    "worst error",
)


def verdict(row: Result) -> str:
    """The status in the table: "Dynamo fails" if `torch.compile(backend="eager")` does not train the class either."""
    if row["status"] in ("parity", "random", "eager fails") or row.get("dynamo", "parity") == "parity":
        return row["status"]
    return "Dynamo fails"


def table(rows: list[Result]) -> str:
    """The results as Markdown: figures of each library, failures by reason, reasons for whole-batch, a line for each class."""
    rows = sorted(rows, key=lambda row: row["name"].lower())
    libraries = {name: [r for r in rows if r["library"] == name] for name in dict.fromkeys(r["library"] for r in rows)}
    made_with = ", ".join(f"{name} {version(name)}" for name in ("torch", *libraries))
    lines = [
        "# Coverage",
        "",
        f"One training step of a tiny model of each class: {made_with}.",
        "Made by `python tests/coverage/run.py`, which tells what is compared.",
        "",
        *totals({**libraries, "all": rows} if len(libraries) > 1 else libraries),
        "",
    ]
    for status, title in FAILURES.items():
        failed = [row for row in rows if verdict(row) == status]
        if failed:
            lines += [f"## {title} ({len(failed)})", ""]
            lines += [
                f"- {', '.join(names)}: {reason}" for reason, names in grouped((r["reason"], r["name"]) for r in failed)
            ] + [""]
    lines += ["## What keeps a stack from being streamed layer by layer", "", *missed(rows), ""]
    lines += ["## What runs whole-batch", "", WHOLE, "", "| why | classes | such as |", "|---|---|---|"]
    whole = grouped((reason, row["name"]) for row in rows for reason in row.get("whole", ()))
    lines += [f"| {reason} | {len(names)} | {', '.join(names[:3])} |" for reason, names in whole]
    lines += ["", CLASSES, ""]
    for name, group in libraries.items():
        lines += [f"### {name}", "", cells(COLUMNS), "|---" * len(COLUMNS) + "|", *map(line, group), ""]
    return "\n".join(lines)


def version(package: str) -> str:
    return importlib.metadata.version(package)


def totals(libraries: dict[str, list[Result]]) -> list[str]:
    """A table of the figures, a column for each library."""
    columns = [figures(rows) for rows in libraries.values()]
    return [
        cells(("model classes", *libraries)),
        "|---" * (len(columns) + 1) + "|",
        *(cells((name, *(column[name] for column in columns))) for name in columns[0]),
    ]


def missed(rows: list[Result]) -> list[str]:
    """A line for each stack that is not streamed layer by layer."""
    found = ((row["name"], stack, state) for row in rows for stack, state in row.get("stacks", {}).items())
    return [f"- {escaped(name)}, {escaped(stack)}: {state}" for name, stack, state in found if state not in (SPLIT, ACROSS)] or [
        "Nothing."
    ]


def figures(rows: list[Result]) -> dict[str, str]:
    """The summary: numbers of classes that were tried, that train, and that are streamed layer by layer."""
    kinds = Counter(map(verdict, rows))
    eager = len(rows) - kinds["eager fails"] - kinds["random"]
    dynamo = eager - kinds["Dynamo fails"]
    compiled = [row for row in rows if "programs" in row]
    stacks = [state for row in compiled for state in row["stacks"].values()]
    deep = [(row, row["deep"]) for row in compiled if "blocks" in row.get("deep", ())]
    return {
        "attempted": str(len(rows)),
        "trained by eager, besides those that are random": str(eager),
        'of these, trained by `torch.compile(backend="eager")`': str(dynamo),
        "**of these, parity with l2l**": share(kinds["parity"], dynamo),
        "silently wrong": str(kinds["differs"]),
        "captured in one graph, of those that l2l compiled": share(sum(row["programs"] == 1 for row in compiled), len(compiled)),
        "**stacks streamed layer by layer**": share(sum(state in (SPLIT, ACROSS) for state in stacks), len(stacks)),
        "of these, cut at the borders of layers": str(stacks.count(SPLIT)),
        "classes with every stack streamed layer by layer, of those with stacks": share(
            sum({*row["stacks"].values()} <= {SPLIT, ACROSS} for row in compiled if row["stacks"]),
            sum(bool(row["stacks"]) for row in compiled),
        ),
        "no more blocks in a deeper model, of those with a depth": share(
            sum(row["blocks"] >= d["blocks"] for row, d in deep), len(deep)
        ),
        "at most 5 % more peak device memory in a deeper model": share(
            sum(d["peak"] <= 1.05 * row["peak"] for row, d in deep), len(deep)
        ),
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
    made = [escaped(row["name"]), row["task"], row.get("dtype", ""), verdict(row)]
    if "programs" in row:
        found = sum(state in (SPLIT, ACROSS) for state in row["stacks"].values())
        whole = ", ".join(reason.split()[0] if reason.startswith("aten.") else escaped(reason) for reason in row["whole"])
        made += [
            str(row["programs"]),
            f"×{row['repeats']}",
            f"{found} of {len(row['stacks'])}",
            f"{row['largest']:.2f}",
            *depths(row),
            whole,
            f"{row['error']:.1e}",
        ]
    return cells(made + [""] * (len(COLUMNS) - len(made)))


def depths(row: Result) -> list[str]:
    """The cells of layers, blocks and peak."""
    deep = row.get("deep", {})
    if "blocks" not in deep:
        return [str(row["layers"]), str(row["blocks"]), "fails when deeper" if deep else ""]
    return [
        f"{row['layers']} ({deep['layers']})",
        f"{row['blocks']} ({deep['blocks']})",
        f"×{deep['peak'] / max(row['peak'], 1):.2f}",
    ]


def cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def escaped(text: str) -> str:
    for character in "|<*_":
        text = text.replace(character, "\\" + character)
    return text
