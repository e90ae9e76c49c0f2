"""Dynamic loss scaling for fp16, with the rules and defaults of `torch.amp.GradScaler`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor on the loss. An overflow halves it; `growth_interval` steps in a row without one double it."""

    value: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """A step is over; `overflow` says whether one of its gradients was not finite."""
        if overflow:
            self.value *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0
