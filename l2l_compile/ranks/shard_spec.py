"""How a tensor is sharded over ranks: where the shard of each is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardSpec:
    """A tensor of `shape` on `ranks` ranks: `Shard(0)` of DTensor, or with `replicated` the whole tensor on each rank.

    A shard has `rows` rows; the last shards may have fewer or none. Shards padded to `rows` and concatenated have the shape
    `padded`. The concatenation begins with the tensor itself, and all padding is at its end.
    """

    shape: tuple[int, ...]
    ranks: int
    replicated: bool = False

    @property
    def rows(self) -> int:
        """Rows of a shard, padding included."""
        return -(-self.shape[0] // self.ranks)

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape of all shards, concatenated, padding included. If each rank has the whole tensor, `shape`."""
        return self.shape if self.replicated else (self.rows * self.ranks, *self.shape[1:])

    @property
    def entries(self) -> int:
        """Entries of a shard, padding included."""
        return math.prod(self.shape) if self.replicated else self.rows * math.prod(self.shape[1:])

    def span(self, rank: int) -> range:
        """The rows of a rank, without padding."""
        return range(min(rank * self.rows, self.shape[0]), min((rank + 1) * self.rows, self.shape[0]))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of the shard of a rank, without padding."""
        return self.shape if self.replicated else (len(self.span(rank)), *self.shape[1:])


def stride_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()
