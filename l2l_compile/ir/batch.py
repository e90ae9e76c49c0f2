"""Where the rows of the batch stand in a value."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """A *batched* value: dimension `dim` has `multiple * B` entries for a batch of `B` rows, row outermost in it.

    Entry `row * multiple + i` of that dimension belongs to `row`, so rows `[a, b)` are entries
    `[a * multiple, b * multiple)`. A value without a `Batch` is *invariant*: the same for every micro-batch.
    """

    dim: int
    multiple: int = 1

    def __str__(self) -> str:
        return f"batch in dim {self.dim}" + (f" x{self.multiple}" if self.multiple != 1 else "")
