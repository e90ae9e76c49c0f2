"""Offsets of tensors within one buffer."""

from __future__ import annotations

from collections.abc import Sequence

_ALIGNMENT = 256  # bytes; as in CUDA's caching allocator, and enough for vectorised kernels


def aligned(size: int) -> int:
    """A size in bytes rounded up to the alignment of weights within a slab."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of a buffer in bytes, in order. Neighbours with only padding between them are joined."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and start - found[-1][1] < _ALIGNMENT:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
