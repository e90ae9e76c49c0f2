"""The wire: the parameters of a segment as they cross the link, in one contiguous buffer on the host."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.device import aligned


class Wire:
    """Copies of some parameters, in the dtypes that cross the link, laid out as in a weight slab.

    buffer   uint8; pinned where the device can copy from it directly
    views    the copies, one per parameter, in the order given
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], pin: bool):
        self.parameters = tuple(parameters)
        sizes = [p.numel() * dtype.itemsize for p, dtype in zip(parameters, dtypes, strict=True)]
        self.spans, end = [], 0
        for size in sizes:
            self.spans.append((end, end + size))
            end += aligned(size)
        self.buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
        self.views = self.in_slab(self.buffer, dtypes)
        self.dtypes = tuple(dtypes)

    def in_slab(self, slab: torch.Tensor, dtypes: Sequence[torch.dtype] | None = None) -> list[torch.Tensor]:
        """The parameters as views of a buffer with this layout."""
        return [
            slab[start:end].view(dtype).view(p.shape)
            for p, dtype, (start, end) in zip(self.parameters, dtypes or self.dtypes, self.spans, strict=True)
        ]

    def refresh(self) -> None:
        """Copy the parameters anew."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            view.copy_(parameter.detach())
