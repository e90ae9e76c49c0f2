"""A compilation as text after every pass: files of `explain(..., dump=folder)`, artifacts of `TORCH_TRACE`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch._logging import trace_structured

from .passes.compilation import Compilation, Pass
from .passes.pipeline import After
from .units import format_bytes


def text_of(compilation: Compilation) -> str:
    """The latest result of the passes so far: the program, or else the segments, the layers or the captured graph."""
    if compilation.forward is not None:
        return str(compilation.program())
    if compilation.segments:
        return "\n".join(("segments:", *_segments(compilation)))
    if compilation.layers:
        return "\n".join(("layers:", *_layers(compilation)))
    return str(compilation.captured.graph)


def _segments(compilation: Compilation) -> Iterator[str]:
    for segment in compilation.segments:
        values, outputs = (", ".join(map(str, some)) for some in (segment.values, segment.outputs))
        yield f"  {segment.name}: {segment.block.name}, {format_bytes(segment.parameter_bytes)}, reads ({values}), makes ({outputs})"


def _layers(compilation: Compilation) -> Iterator[str]:
    for layer in sorted(compilation.layers, key=lambda layer: layer.start):
        first, last = compilation.sequence.nodes[layer.start], compilation.sequence.nodes[layer.stop - 1]
        yield f"  {len(layer)} operations from '{first.name}' to '{last.name}'"


class Dump:
    """Writes a file after every pass of every program: `folder/program0/04_find_blocks.txt`, seconds in its first line."""

    def __init__(self, folder: str | Path):
        self.folder, self._programs = Path(folder), 0

    def next_program(self) -> After:
        """The function to call after each pass of the next program. Files of an earlier dump in its folder are deleted."""
        place = self.folder / f"program{self._programs}"
        self._programs += 1
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)

        def after(step: Pass, compilation: Compilation, seconds: float) -> None:
            number = len(list(place.iterdir()))
            (place / f"{number:02d}_{step.name}.txt").write_text(f"# {step.name}: {seconds:.3f} s\n\n{text_of(compilation)}\n")

        return after


def trace(step: Pass, compilation: Compilation, seconds: float) -> None:
    """Write an artifact for `tlparse` after every pass, if the environment variable `TORCH_TRACE` is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"l2l_{step.name}", "encoding": "string"},
        payload_fn=lambda: f"# {step.name}: {seconds:.3f} s\n\n{text_of(compilation)}",
    )
