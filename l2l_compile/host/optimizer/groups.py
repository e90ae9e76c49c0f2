"""The param_groups of an optimizer whose layers are updated one by one, beside its own `step`."""

from __future__ import annotations

import torch

from .torch_step import Hyperparameters, hyperparameters


class Groups:
    """Keeps the counts that an optimizer has in its groups right.

    Its own `step` finds no gradients of ours, so what it counts is undone. Every layer's step counts the same from the same
    start, so what the last one has counted is put into the groups once a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._before: Hyperparameters = []
        self._after: Hyperparameters = []
        self._snapshots: list[Hyperparameters] = []  # one for each `step` that is running: it may call that of its base class

    def counted(self, before: Hyperparameters, after: Hyperparameters) -> None:
        """The step of a layer has turned the hyperparameters `before` into `after`."""
        self._before, self._after = before, after

    def commit(self) -> None:
        """Put into the groups what the layers' steps have changed."""
        for group, before, after in zip(self._optimizer.param_groups, self._before, self._after, strict=False):
            for name, value in after.items():
                if not isinstance(value, torch.Tensor) and value != before.get(name):
                    group[name] = value
        self._after = []

    def begin_own_step(self) -> Hyperparameters:
        """The optimizer's own `step` begins: the hyperparameters now."""
        self._snapshots.append(hyperparameters(self._optimizer))
        return self._snapshots[-1]

    def end_own_step(self) -> None:
        """The optimizer's own `step` is over: undo what it has changed."""
        if not self._snapshots:
            return
        for group, before in zip(self._optimizer.param_groups, self._snapshots.pop(), strict=True):
            for name in set(group) - set(before) - {"params"}:
                del group[name]
            group.update({k: v for k, v in before.items() if not isinstance(v, torch.Tensor)})

    def forget_own_steps(self) -> None:
        """Steps that have failed were not ended."""
        self._snapshots.clear()
