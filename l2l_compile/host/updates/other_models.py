"""Several compiled models that train parameters of one optimizer, or read each other's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.updates.gradient_ledger import GradientLedger, Parameter
from l2l_compile.memory.finalizers import items, members


class ModelUpdates(Protocol):
    """The overlapped updates of one compiled model."""

    optimizer: torch.optim.Optimizer
    ledger: GradientLedger

    @property
    def managed(self) -> set[Parameter]:
        """The parameters that are updated here."""

    @property
    def clips(self) -> bool:
        """Whether gradients of this step are clipped."""

    def synchronize(self) -> None:
        """Block until every update made so far can be seen."""

    def stop_watching(self) -> None:
        """Watch the parameters no longer."""


_updates_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[ModelUpdates]] = weakref.WeakKeyDictionary()


def register(updates: ModelUpdates) -> None:
    """Let the updates of other models find these, for as long as they are alive."""
    _updates_of.setdefault(updates.optimizer, weakref.WeakSet()).add(updates)


def updates_with(optimizer: torch.optim.Optimizer) -> list[ModelUpdates]:
    """The overlapped updates of all compiled models with this optimizer."""
    return members(_updates_of[optimizer])


def updates_of_others(mine: object) -> list[ModelUpdates]:
    """The overlapped updates of all other compiled models."""
    return [each for _, of_one in items(_updates_of) for each in members(of_one) if each is not mine]


def wait_for_other_models(mine: object, parameters: Iterable[Parameter]) -> None:
    """Block until updates of these parameters that other compiled models have put off can be seen."""
    read = set(parameters)
    for other in updates_of_others(mine):
        if not other.managed.isdisjoint(read):
            other.synchronize()


def check_one_model_steps(mine: ModelUpdates) -> None:
    """Raise `L2LError` if another model takes part in this step of the optimizer, and shares parameters or clips by the same norm."""
    for other in updates_with(mine.optimizer):
        if other is not mine and other.ledger.has_begun:
            shared = len(mine.ledger.trained & other.ledger.trained)
            if shared or mine.clips or other.clips:
                why = f"train {shared} of the same parameters" if shared else "are to be clipped by one norm"
                raise L2LError(
                    f"two compiled models {why} in one step of an optimizer, but each makes its own updates: compile one module that "
                    "holds both, or use update='at_step'"
                )
