"""A compilation as text after every pass: files of `explain(..., dump=folder)`, artifacts of `TORCH_TRACE`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._logging import trace_structured

from l2l_compile.errors import L2LError
from l2l_compile.passes.compilation import Compilation, Pass
from l2l_compile.passes.pipeline import After
from l2l_compile.units import format_bytes


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
        """The function to call after each pass of the next program.

        Files of an earlier dump in its folder are deleted, and no other files. Raises `L2LError` where the folder cannot be
        written to, or has a file of the user's with a name that is needed.
        """
        place = self.folder / f"program{self._programs}"
        self._programs += 1
        with _explained(place):
            place.mkdir(parents=True, exist_ok=True)
            for path in filter(_is_of_a_dump, sorted(place.iterdir())):
                path.unlink()
        written = 0

        def after(step: Pass, compilation: Compilation, seconds: float) -> None:
            nonlocal written
            path = place / f"{written:02d}_{_NO_NAME.sub('_', step.name)}.txt"
            written += 1
            text = f"# {step.name}: {seconds:.3f} s\n\n{text_of(compilation)}\n"
            with _explained(path), path.open("x", encoding="utf-8") as file:  # "x": never over a file that exists
                file.write(text)

        return after


_NO_NAME = re.compile(r"[^\w.-]")  # a pass of the user may have any name
_FILE = re.compile(r"\d\d+_[\w.-]+\.txt")
_HEADING = re.compile(r"# .+: \d+\.\d{3} s\n")


def _is_of_a_dump(path: Path) -> bool:
    """Whether an earlier dump has written a file: its name and its first line say so."""
    if not _FILE.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _HEADING.fullmatch(file.readline(1000)) is not None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise `L2LError` in place of an error of the disk."""
    try:
        yield
    except FileExistsError as error:
        raise L2LError(f"{path} exists, and explain(dump=...) has not written it. Remedy: dump into another folder") from error
    except OSError as error:
        raise L2LError(f"{path} cannot be written ({error.strerror or error}). Remedy: dump into a folder of your own") from error


def log_artifact(step: Pass, compilation: Compilation, seconds: float) -> None:
    """Write an artifact for `tlparse` after every pass, if the environment variable `TORCH_TRACE` is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"l2l_{step.name}", "encoding": "string"},
        payload_fn=lambda: f"# {step.name}: {seconds:.3f} s\n\n{text_of(compilation)}",
    )
