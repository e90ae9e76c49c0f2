"""Memory for gradients on the host that are summed, or as wide as their parameters."""
from __future__ import annotations

import torch

from .pages import Pool, unlocked


class GradientMemory:
    """Buffers that are used again from step to step.

    Gradients that go one by one would leave holes in the heap, which fit nothing that comes after them.
    """

    def __init__(self) -> None:
        self._pool = Pool(unlocked())

    def widened(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient in this dtype; the same tensor if it has it."""
        if gradient.dtype == dtype:
            return gradient
        return self._pool.empty(gradient.shape, dtype, "a gradient").copy_(gradient)

    def added(self, total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A sum in this dtype, in the memory of `total`; a single gradient stays as it came over the link."""
        return gradient if total is None else self.widened(total, dtype).add_(gradient)
