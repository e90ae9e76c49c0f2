"""What a training loop asks of gradients and parameters that overlapped updates do not keep where PyTorch keeps them.

The loop may read and set `p.grad`, read parameters while they are updated, call `zero_grad(set_to_none=False)`, or call
`optimizer.step()` twice. The answer is the one that eager gives, or an error, or a warning.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.hooks import optimizers_of, running_steps
from l2l_compile.host.updates.eager_gradients import EagerGradients
from l2l_compile.host.updates.gradient_ledger import GradientLedger, Parameter
from l2l_compile.host.watched_parameters import ParameterWatch, is_read_by
from l2l_compile.host.worker import Worker
from l2l_compile.param_groups import parameters_of
from l2l_compile.user_line import warn

_clipped_by_the_loop: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def loop_clips(optimizer: torch.optim.Optimizer) -> None:
    """The loop of another library hands its clipping to `Updates.clip`, and may look at `p.grad` before: it gets no gradients."""
    _clipped_by_the_loop.add(optimizer)


def refuse_gradient_hooks(parameters: Iterable[Parameter], update: str) -> None:
    """Raise `L2LError` if one of these parameters has a hook on its gradient, which would never run."""
    hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise L2LError(
            f"{len(hooked)} parameters have gradient hooks, which cannot run with update={update!r}: the gradients never come to p.grad. "
            "Remove the hooks, or use update='at_step'"
        )


class AskedByTheLoop(ABC):
    """The part of `OverlappedUpdates` that answers. Called on the user's thread."""

    optimizer: torch.optim.Optimizer
    worker: Worker
    ledger: GradientLedger
    _eager: EagerGradients
    _watch: ParameterWatch
    _said: set[str]

    @property
    @abstractmethod
    def managed(self) -> set[Parameter]:
        """The parameters that are updated here."""

    @abstractmethod
    def synchronize(self) -> None:
        """As in `Updates`."""

    def watch_again(self) -> None:
        """Watch the parameters of which the caller may ask something that is not where PyTorch has it. Not within a step."""
        if not running_steps(self.optimizer):
            self._watch_now()

    def _watch_now(self) -> None:
        gradients: Collection[Parameter] = self.ledger.trained if self.ledger.has_begun else self._eager.used
        if self.optimizer in _clipped_by_the_loop:
            gradients = ()
        entries = self._being_updated()
        if gradients or entries or self._watch.is_on:
            self._watch.begin(gradients, entries)

    @property
    @abstractmethod
    def clips(self) -> bool:
        """Whether gradients are clipped by the option `max_grad_norm`."""

    @property
    def is_clipped_by_the_loop(self) -> bool:
        """Whether the training loop of a library clips, and looks at gradients only to choose how."""
        return self.optimizer in _clipped_by_the_loop

    def hand_over(self) -> None:
        """Compiled code of another backend is about to run, which may read `p.grad` where nothing is watched."""

    def cannot_watch(self, count: int) -> None:
        """The gradients of some parameters cannot be watched."""
        if not self.clips:
            self._say_once(
                f"p.grad of {count} parameters is None between backward and optimizer.step(), where update={self.ledger.update!r} has "
                "their gradients: they are plain tensors, or of a class with its own __torch_function__. Code that clips or changes "
                "their gradients does nothing: use update='in_forward' with the option max_grad_norm, or update='at_step'"
            )

    def is_at_work(self) -> bool:
        return self.worker.is_here

    def read_gradient(self, parameter: Any, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient that the caller reads in `p.grad`. Raises `L2LError` if there is none where eager has one."""
        if self.optimizer in _clipped_by_the_loop:
            return own
        if self.ledger.has_begun and parameter in self.ledger.trained:
            return self._read_in_step(parameter, own)
        if own is None and parameter in self._eager.used and not is_read_by("zero_grad", "_apply"):
            self._say_once(
                f"p.grad is read behind optimizer.step(), where update={self.ledger.update!r} has used the gradients up: it is None. "
                "l2l_compile.stats(model).gradient_norm has their norm. With update='in_forward', p.grad can be read between backward "
                "and optimizer.step()"
            )
        return own

    def write_gradient(self, parameter: Any, gradient: torch.Tensor | None) -> None:
        """The caller sets `p.grad`. Raises `L2LError` if the step has used the gradient already."""
        if self.ledger.has_begun and parameter in self.ledger.trained:
            self._write_in_step(parameter)
        self._eager.written(parameter)

    def before_reading(self) -> None:
        """The caller reads a parameter, or writes into it, while updates are under way."""
        self._watch.end()
        try:
            self.synchronize()
        finally:
            self.watch_again()

    def before_compiled_code(self) -> None:
        """Compiled code of another backend is about to run, which may read parameters or write into them."""
        self.before_reading()

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(f"backend 'l2l': {message}")

    @abstractmethod
    def _read_in_step(self, parameter: Parameter, own: torch.Tensor | None) -> torch.Tensor | None:
        """`read_gradient` between backward and `optimizer.step()`."""

    @abstractmethod
    def _write_in_step(self, parameter: Parameter) -> None:
        """`write_gradient` between backward and `optimizer.step()`."""

    def _take_back(self) -> None:
        """Gradients that the caller has read take part in the step again."""

    @abstractmethod
    def _being_updated(self) -> Iterable[Parameter]:
        """Parameters whose updates may be under way, or still to come, outside of compiled code."""

    def _another_optimizer_has_them(self) -> bool:
        """Whether another optimizer holds parameters of this one: the loop may step that one."""
        return any(each is not self.optimizer for each in optimizers_of(self.managed))

    def _zeros_without(self, arrived: Collection[Parameter]) -> list[Parameter]:
        """The parameters that the step updates with a gradient of zeros, as eager does behind `zero_grad(set_to_none=False)`."""
        zeros = self._eager.zeros
        if not zeros:
            return []
        return [p for p in parameters_of(self.optimizer) if p in zeros and p not in arrived and p.grad is None]

    def _refuse_a_second_step(self) -> None:
        """Raise `L2LError` if `optimizer.step()` is called twice behind one backward."""
        if self._eager.used:
            raise L2LError(
                "optimizer.step() was called twice behind one backward. PyTorch would update twice with the same gradients, but "
                f"update={self.ledger.update!r} has used them up in the first call. Call optimizer.zero_grad() or backward before the "
                "second one, or use update='at_step'"
            )
