"""A weight slab that a fetch fills with this rank's shards: the offsets of a segment's weights, and of the shards in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.memory.layout import aligned
from l2l_compile.ranks.shard_spec import ShardSpec


@dataclass(frozen=True)
class Slot:
    """A weight in a slab: its offset in bytes, its shape with padding, and how it is sharded (`shard_spec`; None if it is not)."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_spec: ShardSpec | None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def own(self, rank: int) -> int:
        """The offset of a rank's shard in the slab, in bytes."""
        is_whole = self.shard_spec is None or self.shard_spec.replicated
        return self.start + (0 if self.shard_spec is None or is_whole else rank * self.shard_spec.entries * self.dtype.itemsize)

    def padded(self, slab: torch.Tensor) -> torch.Tensor:
        """The weight as a view of the slab, with its padding."""
        return slab[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)

    @property
    def is_gathered(self) -> bool:
        return self.shard_spec is not None and not self.shard_spec.replicated


def slots(segment: Segment, bindings: Bindings) -> list[Slot]:
    """The places of a segment's weights, one after another."""
    found, start = [], 0
    for weight, spec in zip(segment.weights, segment.block.weights, strict=True):
        shape = spec.sizes(bindings) if weight.shard_spec is None else weight.shard_spec.padded
        found.append(Slot(start, shape, spec.dtype, weight.shard_spec))
        start += aligned(found[-1].bytes)
    return found


def slab_bytes(segments: Sequence[Segment], bindings: Bindings) -> int:
    """Bytes of the slab that fits each of these segments."""
    return max((sum(aligned(slot.bytes) for slot in slots(segment, bindings)) for segment in segments), default=0)
