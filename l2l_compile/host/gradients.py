"""Memory for gradients on the host that are summed, or as wide as their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from l2l_compile.ir.captured import ParameterSlice
from l2l_compile.memory.heap import apart_from_the_heap
from l2l_compile.memory.layout import aligned
from l2l_compile.memory.pages import Lease, Pool, unlocked


class GradientMemory:
    """Buffers that are used again from step to step.

    Gradients that are freed one by one would leave holes in the heap that fit no later tensor. The gradients of a segment
    can share a buffer, and a wire can use this buffer while there are no gradients.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool or Pool(unlocked())

    def begin_step(self) -> None:
        """As `Pool.begin_step`."""
        self._pool.begin_step()

    def widened(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient in this dtype; the same tensor if it has this dtype already."""
        if gradient.dtype == dtype:
            return gradient
        return self._pool.empty(gradient.shape, dtype, "a gradient").copy_(gradient)

    def alone(self, gradient: torch.Tensor) -> torch.Tensor:
        """A copy of a gradient that waits: a buffer that the gradients of a segment share is free when none of them is left in it."""
        with apart_from_the_heap():
            return gradient.clone()

    def wire(self, parameters: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """The first `size` bytes of a buffer for gradients as wide as these parameters."""
        return self._together(parameters).tensor(0, torch.Size([size]), torch.uint8)

    def widen_together(self, gradients: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> None:
        """Replace gradients in the list that are narrower than their parameters by copies in a buffer that they share."""
        lease, start = None, 0
        for position, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True)):
            if gradient is not None and gradient.dtype != parameter.dtype:
                lease = lease or self._together(parameters)
                gradients[position] = lease.tensor(start, gradient.shape, parameter.dtype).copy_(gradient)
            start += aligned(parameter.nbytes)

    def _together(self, parameters: Sequence[torch.Tensor]) -> Lease:
        size = sum(aligned(p.nbytes) for p in parameters)
        return self._pool.lease(max(size, 1), "the gradients of a segment")

    def added(self, total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of both in this dtype, in the memory of `total`. Without `total`, the gradient as it came over the link."""
        return gradient if total is None else self.widened(total, dtype).add_(gradient)

    def collected(
        self, total: torch.Tensor | None, gradient: torch.Tensor, parameter: torch.Tensor, cut: ParameterSlice | None
    ) -> torch.Tensor:
        """`added`, for a gradient of a parameter or of a slice of it. A slice is added at its place in the whole sum."""
        if cut is None:
            return self.added(total, gradient, parameter.dtype)
        if total is None:
            total = self._pool.empty(parameter.shape, parameter.dtype, "a gradient").zero_()
        total = self.widened(total, parameter.dtype)
        cut.view(total).add_(gradient)
        return total
