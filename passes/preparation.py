"""What is done to a captured graph before it is cut: outputs that nobody wants, losses, precision, and the line of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..capture import drop_outputs
from ..precision import narrow
from .compilation import Compilation, Fact
from .line import Line
from .loss_terms import gather_loss_terms


@dataclass(frozen=True)
class DropOutputs:
    """With `outputs="loss"`, outputs with the batch dimension are not made where there is a loss beside them."""

    name: ClassVar = "drop_outputs"
    requires: ClassVar = frozenset()
    provides: ClassVar = frozenset()

    def apply(self, compilation: Compilation) -> None:
        if compilation.options.outputs == "loss":
            drop_outputs(compilation.captured)


@dataclass(frozen=True)
class GatherLossTerms:
    """Losses over the batch are written row by row, so that their scores need not be there for all rows at once."""

    name: ClassVar = "gather_loss_terms"
    requires: ClassVar = frozenset()
    provides: ClassVar = frozenset()

    def apply(self, compilation: Compilation) -> None:
        options = compilation.options
        if options.micro_batches > 1:
            gather_loss_terms(compilation.captured, only_largest=options.precision != "fp32")


@dataclass(frozen=True)
class Narrow:
    """With `precision="bf16"` or `"fp16"`, parameters and activations have 16 bits on the link and between segments."""

    name: ClassVar = "narrow"
    requires: ClassVar = frozenset()
    provides: ClassVar = frozenset()

    def apply(self, compilation: Compilation) -> None:
        if compilation.options.precision != "fp32":
            narrow(compilation.captured, compilation.options.precision)


@dataclass(frozen=True)
class ReadLine:
    """Provides `line`: the operations in order, where they may be cut, and what a cut costs."""

    name: ClassVar = "read_line"
    requires: ClassVar = frozenset()
    provides: ClassVar = frozenset({Fact.LINE})

    def apply(self, compilation: Compilation) -> None:
        compilation.line = Line(compilation.captured)
