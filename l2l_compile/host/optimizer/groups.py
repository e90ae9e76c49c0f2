"""The param_groups of an optimizer whose layers are updated one by one, beside its own `step`."""

from __future__ import annotations

import torch

from .torch_step import Hyperparameters, hyperparameters


class Groups:
    """Keeps the counts that an optimizer has in its param_groups right.

    The optimizer's own `step` finds no gradients of the compiled model, so its changes of the counts are undone. The step of
    every layer counts the same from the same start, so the counts after the last layer are put into the groups, once a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._before: Hyperparameters = []
        self._after: Hyperparameters = []
        self._snapshots: list[Hyperparameters] = []  # one for each running `step`, which may call its base class's `step`

    def counted(self, before: Hyperparameters, after: Hyperparameters) -> None:
        """The step of a layer has turned the hyperparameters `before` into `after`."""
        self._before, self._after = before, after

    def commit(self) -> None:
        """Put the changes of the layers' steps into the groups."""
        for group, before, after in zip(self._optimizer.param_groups, self._before, self._after, strict=False):
            for name, value in after.items():
                if not isinstance(value, torch.Tensor) and value != before.get(name):
                    group[name] = value
        self._after = []

    def begin_own_step(self) -> Hyperparameters:
        """The optimizer's own `step` begins. Returns the hyperparameters now."""
        self._snapshots.append(hyperparameters(self._optimizer))
        return self._snapshots[-1]

    def end_own_step(self) -> None:
        """The optimizer's own `step` is over: undo its changes."""
        if not self._snapshots:
            return
        for group, before in zip(self._optimizer.param_groups, self._snapshots.pop(), strict=True):
            for name in set(group) - set(before) - {"params"}:
                del group[name]
            group.update({k: v for k, v in before.items() if not isinstance(v, torch.Tensor)})

    def forget_own_steps(self) -> None:
        """Drop the snapshots of own steps that failed, and so were never ended."""
        self._snapshots.clear()
