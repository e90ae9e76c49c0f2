"""The inputs of a captured graph, and parts of parameters that are weights of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class Part:
    """A slice of a parameter in one piece of memory: `start` and `shape` in entries, `of` the index of the parameter's input."""

    of: int
    start: int
    shape: tuple[int, ...]

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of the parameter, or of a tensor of its shape: a view without a history of its own, same memory."""
        return whole.detach().view(-1)[self.start : self.start + torch.Size(self.shape).numel()].view(self.shape)


@dataclass(frozen=True)
class Input:
    """An input of the captured graph, or a part of one.

    kind    "parameter", "buffer", "state" (a tensor of the model that goes from segment to segment as a value: `writes.py`),
            "value" or "symbol"
    index   its place among the arguments of a call, and behind them for a part
    part    which part of a parameter it is; None for an argument
    """

    index: int
    node: fx.Node
    name: str
    kind: str
    part: Part | None = None

    @property
    def is_weight(self) -> bool:
        return self.kind in ("parameter", "buffer")

    @property
    def owner(self) -> int:
        """The index of the argument that it is, or is a part of."""
        return self.index if self.part is None else self.part.of
