"""`delay=1`: the updates of a step run while the next step computes. That step reads the weights from before these updates.

    W(t + 1) = W(t) - v * g(W(t - 1))

This is the rule of PipeDream-2BW (arXiv 2006.09503) and of ZeRO-Offload's delayed parameter update (arXiv 2101.06840): the host has
a whole step to update. The first two steps compute at the weights that training began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from l2l_compile.host.double_buffer import DelayedWires
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.hooks import WeakHook, remove_with
from l2l_compile.host.run_contents import Earlier
from l2l_compile.host.step.torch_step import Hyperparameters
from l2l_compile.host.stored_parameters import StoredParameters
from l2l_compile.host.updates.earlier_weights import add
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward
from l2l_compile.host.updates.in_forward import UpdatesInForward
from l2l_compile.host.worker import Worker
from l2l_compile.options import Options
from l2l_compile.reentry import whole


class DelayedUpdates(UpdatesInForward):
    """As `UpdatesInForward`, but the next forward and backward wait for no update: wires keep the weights from before it.

    The next `optimizer.step()` waits. Updates have a lane of their own, so the host lane collects gradients of the next step at
    the same time. A checkpoint of the optimizer holds the weights that the next step reads.
    """

    def __init__(
        self, options: Options, worker: Worker, wires: DelayedWires, threads: int, memory: GradientMemory, updating: Worker
    ):
        super().__init__(options, worker, wires, threads, memory)
        self._updating, self._wires = updating, wires
        wires.wait = super().wait
        wires.restore({**(self._run.take_earlier() if self._run is not None else {}), **self._loaded})
        remove_with(self, self.optimizer.register_state_dict_post_hook(WeakHook(self._save)).remove)

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def begin_forward(self, parameters: Sequence[Parameter], to_train: bool) -> PendingBackward | None:
        """Evaluation reads the newest weights."""
        if not to_train:
            self.synchronize()
        return super().begin_forward(parameters, to_train)

    def wait(self, parameters: Iterable[Parameter]) -> None:
        """Does not wait for updates. Raises their failures."""
        for worker in (self.worker, self._updating):
            worker.raise_failure()

    def _move(self, stored: StoredParameters, parameters: Sequence[Parameter]) -> None:
        with self._wires.moving(parameters):
            super()._move(stored, parameters)

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        """Waits until the gradients of the step before were looked at: the loss scale then accounts for all earlier steps."""
        if self._looked is not None:
            self._looked.wait()
        self.worker.accesses.read(self._place_of_norm)
        super().begin_backward(pending, pushes)

    def _drain(self) -> None:
        super()._drain()
        self._updating.drain(self.forget)
        self._wires.updating = frozenset()

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        self._wires.updating = frozenset()

    def _await_updates(self) -> None:
        """Weights that a run keeps are at the newest places of the file, which are known behind the writes."""
        super()._await_updates()
        if self._run is not None:
            self._finish_writes()

    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        self._wires.turn()
        self._wires.updating = frozenset((*self.ledger.gradients, *zeros))
        if self._run is not None:
            self._run.keep_before()
        super()._end_step(groups, zeros)

    def commit(self, extra: Any = None) -> bool:
        """Weights that the caller has written behind the updates of the step are those that the next step reads."""
        if self._run is not None and self._run.is_over and not self._wires.updating:
            self._wires.find_writes()
            self._run.drop_before(self._wires.is_ahead)
        return super().commit(extra)

    @whole("optimizer.state_dict()")
    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the weights that the next step reads to a checkpoint of the optimizer."""
        add(self._wires.previous(), optimizer, state_dict)

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the weights that the next step reads out of a checkpoint."""
        plain = super().load(optimizer, state_dict)
        self._wires.restore(self._loaded)
        return plain

    @property
    def _worker_of_commits(self) -> Worker:
        return self._updating

    # ---- called on the lane of updates ---------------------------------------------------------------------------------

    def _before_of_next_step(self) -> Earlier:
        assert self._run is not None, "a step of it is committed"
        return self._wires.previous(but=self._run.masters())

    def _step_layer(self, gradients: Mapping[Parameter, torch.Tensor], factor: float, groups: Hyperparameters) -> None:
        super()._step_layer(gradients, factor, groups)
        self._wires.carry(gradients)
