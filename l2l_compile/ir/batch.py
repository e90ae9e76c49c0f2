"""Where the rows of the batch are in a value."""

from __future__ import annotations

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Batch:
    """A *batched* value: dimension `dim` has `B * multiple` entries for a batch of `B` rows.

    Entry `row * multiple + i` of that dimension belongs to `row`, so rows `[a, b)` are entries `[a * multiple, b * multiple)`.
    A value without a `Batch` is *invariant*: the same for every micro-batch.

    multiple  a number, or in a `TensorSpec` an expression of other sizes (`rows_at` of `ir/values.py` evaluates it)
    """

    dim: int
    multiple: int | sympy.Expr = 1

    def __str__(self) -> str:
        return f"batch in dim {self.dim}" + (f" x{self.multiple}" if self.multiple != 1 else "")
