"""Where the rows of the batch stand in a value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy


@dataclass(frozen=True)
class Batch:
    """A *batched* value: dimension `dim` has `outer * B * multiple` entries for a batch of `B` rows.

    Entry `(o * B + row) * multiple + i` of that dimension belongs to `row`. With `outer` 1, rows `[a, b)` are entries
    `[a * multiple, b * multiple)`, a slice; a larger `outer` is only met inside of a block (values of several layers joined
    along the batch, time folded before it). A value without a `Batch` is *invariant*: the same for every micro-batch.

    multiple  a number, or in a `TensorSpec` an expression of other sizes (`rows_at` of `ir/values.py` gives it a value)
    equal_entries  all entries along `dim` are equal, so any other `outer` and `multiple` with the same product describe it too
    equal_rows     all rows are equal
    upper_bound    entries are whole numbers from 0 on and below this bound; None if there is none that is known
    order     what the entries along `dim` are sorted by, in every micro-batch its own; None if they stand row by row. Only met
              inside of a block
    """

    dim: int
    multiple: int | sympy.Expr = 1
    outer: int = 1
    equal_entries: bool = field(default=False, compare=False)
    equal_rows: bool = field(default=False, compare=False)
    upper_bound: int | None = field(default=None, compare=False)
    order: object | None = None

    @property
    def factor(self) -> int | sympy.Expr:
        """Entries of the dimension for each row."""
        return self.outer * self.multiple

    def at(self, dim: int) -> Batch:
        """The same in another dimension."""
        return replace(self, dim=dim)

    def __str__(self) -> str:
        outer = f"{self.outer} x " if self.outer != 1 else ""
        return f"{outer}batch in dim {self.dim}" + (f" x{self.multiple}" if self.multiple != 1 else "")
