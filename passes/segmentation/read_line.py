"""The pass that lays the captured graph out as a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compilation import Compilation, Fact
from .line import Line


@dataclass(frozen=True)
class ReadLine:
    """Provides `line`: the operations in order, where they may be cut, and what a cut costs."""

    name: ClassVar = "read_line"
    requires: ClassVar = frozenset()
    provides: ClassVar = frozenset({Fact.LINE})

    def apply(self, compilation: Compilation) -> None:
        compilation.line = Line(compilation.captured)
