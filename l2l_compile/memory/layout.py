"""Where tensors stand within one buffer."""

from __future__ import annotations

_ALIGNMENT = 256  # bytes; what the caching allocator of CUDA gives, and enough for vectorised kernels


def aligned(size: int) -> int:
    """A size in bytes rounded up to the alignment of weights within a slab."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
