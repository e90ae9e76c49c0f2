"""The pass that makes the operation sequence of the captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.operation_sequence import OperationSequence


@dataclass(frozen=True)
class SequenceOperations:
    """Provides `sequence`: the operations in order, with the allowed cuts and the cost of each cut."""

    name: ClassVar[str] = "sequence_operations"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SEQUENCE})

    def apply(self, compilation: Compilation) -> None:
        compilation.sequence = OperationSequence(compilation.captured)
