"""When parameters are updated: the interface between the param-server and the three values of the option `update`.

at_step       `optimizer.step()` updates; gradients go to `p.grad` (at_step.py)
in_backward   a parameter is updated as soon as its last gradient of the last round is on the host (in_backward.py)
in_forward    `optimizer.step()` looks at all gradients (their norm, whether they are finite), and the parameters are
              updated in the order in which the next forward fetches them (in_forward.py)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from l2l_compile.host.hooks import WeakHook
from l2l_compile.host.stored_copies import StoredCopies
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward, Pushed
from l2l_compile.host.updates.loss_scale import LossScale
from l2l_compile.host.worker import Ticket
from l2l_compile.reentry import COMPILATION, check, whole
from l2l_compile.runtime.stats import Stats


class Updates:
    """The interface for the param-server. This base class updates nothing: all gradients go to `p.grad`.

    keeps_wires   whether a wire is needed after backward has read it: an update writes it together with the parameters
    scale         the factor on the loss (fp16), None for none
    stored_copies copies that cross the link and are on disk; None if none are
    wants_norms   whether the norm of each gradient is needed when it arrives
    """

    keeps_wires: ClassVar[bool] = False
    scale: LossScale | None = None
    stored_copies: StoredCopies | None = None
    wants_norms: ClassVar[bool] = False
    _watched: weakref.WeakSet[torch.nn.Module]

    @property
    def is_idle(self) -> bool:
        """Whether no step is in progress: begun, and not yet ended here."""
        return True

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """The modules that own the parameters. A `state_dict` of them within a compilation would be of fake tensors: it is refused."""
        for module in modules:
            if module not in self._watched:
                self._watched.add(module)
                module.register_state_dict_pre_hook(WeakHook(self._before_saving))

    @whole("state_dict()")
    def _before_saving(self, *_: Any) -> None:
        check(within=COMPILATION)

    def expect(self, entries: int) -> None:
        """A program has a segment with so many entries of trained parameters, and none with more."""

    def expect_stashes(self, size: int) -> None:
        """A forward needs so much host memory for stashes on their way to the disk, and back."""

    def place(self, parameters: Sequence[Parameter]) -> None:
        """Move parameters to other memory before a forward, that may train, takes views of them."""

    def describe(self, stats: Stats) -> None:
        """Add the figures of the updates."""
        if self.scale is not None:
            stats.loss_scale = self.scale.value

    def scale_now(self) -> float:
        """The loss scale in the gradients of the step that has begun; 1 where they are not scaled."""
        return self.scale.value if self.scale is not None else 1.0

    def next_scale(self) -> float:
        """The factor on the loss of the next backward, behind all steps so far; 1 where gradients are not scaled."""
        if self.scale is not None:
            self.synchronize()  # the last step may change it
        return self.scale_now()

    def drains_with(self, drain: Callable[[], None]) -> None:
        """`drain` runs what is in flight of the last step of the compiled model."""

    def begin_turns(self, pending: PendingBackward) -> None:
        """Some gradients of a backward come later, with turns that are in flight. The step may end before."""

    def end_turns(self, pending: PendingBackward) -> None:
        """The last of these gradients are on their way."""

    def synchronize(self) -> None:
        """Block until every update made so far can be seen. Raises the error of an update that failed."""

    def forget(self, pending: PendingBackward | None = None) -> None:
        """After a failure: drop the gradients of the failed step. No backward of the forward `pending` will run."""

    def begin_forward(self, parameters: Sequence[Parameter], to_train: bool) -> PendingBackward | None:
        """A forward through these parameters begins. Returns its pending backward; None if all gradients go to `p.grad`."""
        return None

    def wait(self, parameters: Iterable[Parameter]) -> None:
        """Block until the updates of these parameters that were put off are done."""

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        """A backward begins, which will hand over gradients `pushes[p]` times for each parameter."""

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        """The gradients of a segment are on the host (host lane)."""

    def update(self, pending: PendingBackward, parameters: Iterable[Parameter]) -> Ticket | None:
        """These parameters have had a gradient collected: update the parameters whose gradients are complete, on the host lane.

        Returns the ticket of this work; None if there is no work.
        """
        return None

    def end_backward(self, pending: PendingBackward) -> None:
        """All gradients of a backward are on their way."""

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of this step as `clip_grad_norm_` does, after backward. Replaces `max_grad_norm` for this step."""

    def squares_of_returned(self, gradients: Iterable[torch.Tensor]) -> float | None:
        """The sum of the squares of gradients that go to `p.grad`. None where they do not count for the norm of the step."""
        return None
