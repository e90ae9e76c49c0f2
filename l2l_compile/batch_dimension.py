"""Which dimension of the inputs is the batch: the first one, unless the model proves to mix its rows.

A model that is given time first, [time, batch, features], attends along dimension 0. Nothing of it could be split there,
so it is traced once more with the second dimension in its place; the trace that leaves more of the model in the inner loop
is the one that runs.
"""
from __future__ import annotations

from dataclasses import dataclass

from . import dynamo
from .capture import Captured
from .passes.compilation import Compilation
from .simplify import hint_of

_ENOUGH = 0.95  # parts of the parameters; a BatchNorm's are few


@dataclass(frozen=True)
class Choice:
    """Dimensions by the name of an input, None for the first of each; the part in the inner loop with the first ones."""

    dimensions: dict[str, int] | None
    part: float
    settled: bool = False


def look_elsewhere(captured: Captured, compilation: Compilation) -> None:
    """Have Dynamo trace the frame again with the batch in another dimension, if that may leave more of it row-wise."""
    before = dynamo.batch_choice()
    if compilation.options.micro_batches == 1 or (before is not None and before.settled):
        return
    part = _part_in_inner_loop(compilation) if captured.batch is not None else 0.0
    if before is None:
        dimensions = _second_dimensions(captured) if captured.batch is not None and part < _ENOUGH else None
        if dimensions:
            dynamo.trace_again(Choice(dimensions, part), "the rows along dimension 0 are mixed")
    elif part <= before.part:
        dynamo.trace_again(Choice(None, before.part, settled=True), "the rows along dimension 1 are mixed as well")


def _part_in_inner_loop(compilation: Compilation) -> float:
    """Of the parameters that work on rows, in bytes; 1 if there are none."""
    rows = [s for s in compilation.segments if any(v.batch or v.mixed for v in s.block.values)]
    total = sum(s.parameter_bytes for s in rows)
    return sum(s.parameter_bytes for s in rows if s.block.inner_looped) / total if total else 1.0


def _second_dimensions(captured: Captured) -> dict[str, int]:
    """Where inputs have the size that is the second of the largest one; {} if that is no batch."""
    values = [i for i in captured.inputs if i.kind == "value"]
    shapes = {dynamo.source_name(i.node): tuple(map(hint_of, i.node.meta["example_value"].shape)) for i in values}
    long = [s for s in shapes.values() if len(s) > 1]
    batch = max(long, key=len)[1] if long else 1
    found = {name: next((dim for dim in (1, 0) if len(s) > dim and s[dim] == batch), None) for name, s in shapes.items()}
    return {name: dim for name, dim in found.items() if dim is not None} if batch > 1 else {}
