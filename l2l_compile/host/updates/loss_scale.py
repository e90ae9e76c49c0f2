"""Dynamic loss scaling for fp16, with the rules and defaults of `torch.amp.GradScaler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.host.hooks import WeakHook, remove_with

_SAVED = "l2l_loss_scale"  # in the first param_group of an optimizer's state_dict: the scale and the number of good steps


@dataclass(eq=False)
class LossScale:
    """The factor on the loss. An overflow halves it; `growth_interval` steps in a row without one double it.

    of_next_step  the factor in the next step, where that begins before the last one has been looked at
    """

    value: float = 65536.0
    of_next_step: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool, used: float | None = None) -> None:
        """A step is over; `overflow` says whether one of its gradients was not finite. `used` is the scale in them, if it is an older one.

        An overflow at a scale that was halved since does not halve it again.
        """
        if overflow:
            if used is None or used <= self.value:
                self.value *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0

    def keep_with(self, optimizer: torch.optim.Optimizer) -> LossScale:
        """Save the scale in the `state_dict` of an optimizer, and load it from there; begin with a scale loaded before."""
        self._load(optimizer)
        handles = [
            optimizer.register_state_dict_pre_hook(WeakHook(self._save)),
            optimizer.register_load_state_dict_post_hook(WeakHook(self._load)),
        ]
        for handle in handles:
            remove_with(self, handle.remove)
        return self

    def _save(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.put_into(optimizer.param_groups[0])

    def put_into(self, group: dict[str, Any]) -> None:
        """Save the scale in the entries of a param_group."""
        group[_SAVED] = (self.value, self.good_steps, self.of_next_step)

    def _load(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        saved = optimizer.param_groups[0].get(_SAVED)
        if saved is not None:
            self.value, self.good_steps = saved[:2]
            self.of_next_step = saved[-1] if len(saved) > 2 else self.value
