"""A step with other roundings: parameters and inputs move by one unit in the last place.

A gradient that is zero but for rounding then takes another value of the same size. Any other changes as little as its condition
allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .difference import GRADIENT, PARAMETER, Key
from .leaves import like, mapped
from .observation import State


class Move:
    """One choice of signs. `batch` says whether inputs without a gradient move as well: a mask of ones and zeros may not."""

    def __init__(self, seed: int, batch: bool):
        self.batch, self._generator = batch, torch.Generator().manual_seed(seed)

    def state(self, state: State, observed: Mapping[Key, Any]) -> State:
        """A model's state with the parameters moved that have a gradient."""
        trained = {key for key in state if key.kind == PARAMETER and observed.get(Key(GRADIENT, key.name)) is not None}
        return {key: self._moved(tensor) if key in trained else tensor for key, tensor in state.items()}

    def inputs(self, tree: Any) -> Any:
        """Arguments that are moved."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            moves = tensor.requires_grad or (self.batch and tensor.is_floating_point())
            return like(tensor, self._moved(tensor.detach())) if moves else tensor

        return mapped(moved, tree)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        signs = (torch.randint(2, tensor.shape, generator=self._generator) * 2 - 1).to(tensor)
        return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)
