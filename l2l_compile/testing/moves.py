"""A step with different roundings: parameters and inputs move by one unit in the last place.

A gradient that is zero up to rounding then takes another value of the same size. Any other gradient changes little, as its
condition number allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l2l_compile.testing.difference import GRADIENT, PARAMETER, Key
from l2l_compile.testing.leaves import like, mapped
from l2l_compile.testing.observation import State


class Move:
    """One random choice of signs. With `batch`, inputs without a gradient move too; a 0/1 mask may not allow it."""

    def __init__(self, seed: int, batch: bool):
        self.batch, self._generator = batch, torch.Generator().manual_seed(seed)

    def state(self, state: State, observed: Mapping[Key, Any]) -> State:
        """A model's state in which the parameters that have a gradient are moved."""
        trained = {key for key in state if key.kind == PARAMETER and observed.get(Key(GRADIENT, key.name)) is not None}
        return {key: self._moved(tensor) if key in trained else tensor for key, tensor in state.items()}

    def inputs(self, tree: Any) -> Any:
        """The arguments of a call, moved."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            moves = tensor.requires_grad or (self.batch and tensor.is_floating_point())
            return like(tensor, self._moved(tensor.detach())) if moves else tensor

        return mapped(moved, tree)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        signs = (torch.randint(2, tensor.shape, generator=self._generator) * 2 - 1).to(tensor)
        return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)
