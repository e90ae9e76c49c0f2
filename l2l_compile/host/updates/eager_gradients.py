"""The gradients that eager would have in `p.grad`, where overlapped updates have none."""

from __future__ import annotations

from collections.abc import Iterable

from l2l_compile.host.updates.gradient_ledger import Parameter


class EagerGradients:
    """For the parameters of one optimizer, between its steps.

    used   parameters whose gradient a step has used up, and that were not zeroed since. Eager still has the gradient
    zeros  parameters whose gradient was set to zero (`zero_grad(set_to_none=False)`), and that got none since. Eager steps them
           with a gradient of zeros: weight decay and momentum go on
    """

    def __init__(self) -> None:
        self.used: set[Parameter] = set()
        self.zeros: set[Parameter] = set()

    def stepped(self, arrived: Iterable[Parameter]) -> None:
        """A step has used up the gradients of these parameters."""
        self.used.update(arrived)
        self.zeros.difference_update(self.used)

    def zeroed(self, set_to_none: bool, arrived: Iterable[Parameter], among: set[Parameter] | None = None) -> None:
        """`zero_grad` was called, for all parameters or for some. `arrived`: parameters with a gradient in the step that has begun."""
        held = self.used.union(self.zeros, arrived)
        these = held if among is None else held & among
        self.used -= these
        self.zeros = self.zeros - these if set_to_none else self.zeros | these

    def written(self, parameter: Parameter) -> None:
        """The caller has set `p.grad`."""
        self.used.discard(parameter)
        self.zeros.discard(parameter)
