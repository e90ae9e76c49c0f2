"""When parameters are updated: the interface between the param-server and the three values of the option `update`.

at_step       `optimizer.step()` updates; gradients go to `p.grad` (at_step.py)
in_backward   a parameter is updated as soon as its last gradient of the last round is on the host (in_backward.py)
in_forward    `optimizer.step()` looks at all gradients (their norm, whether they are finite), and the parameters are
              updated in the order in which the next forward fetches them (in_forward.py)
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...errors import L2LError
from ...frontend.dynamo import apart_from_compilation, in_data_parallel
from ...memory.accesses import Place
from ...options import Options
from ...ranks.ranks import Ranks
from ...runtime.step import Stats
from ..gradients import GradientMemory
from ..hooks import WeakHook, before, hear, put_around_those_of_the_user
from ..wire import Wires
from ..worker import Ticket, Worker
from . import earlier_weights
from .compiled_step import CompiledStep
from .divided import ranks_among
from .gradient_ledger import GradientLedger, Parameter, PendingBackward, Pushed
from .groups import Groups
from .loss_scale import LossScale
from .torch_step import Hyperparameters, TorchStep, check_layers_are_independent


class Updates:
    """The interface for the param-server. This base class updates nothing: all gradients go to `p.grad`.

    keeps_wires   whether a wire is needed after backward has read it: an update writes it together with the parameters
    scale         the factor on the loss (fp16), None for none
    wants_norms   whether the norm of each gradient is needed when it arrives
    """

    keeps_wires: ClassVar[bool] = False
    scale: LossScale | None = None
    wants_norms: ClassVar[bool] = False

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way: begun, and not yet ended here."""
        return True

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """The modules that own the parameters."""

    def describe(self, stats: Stats) -> None:
        """Add the figures of the updates."""
        if self.scale is not None:
            stats.loss_scale = self.scale.value

    def synchronize(self) -> None:
        """Block until every update made so far can be seen. Raises the error of an update that failed."""

    def forget(self, pending: PendingBackward | None = None) -> None:
        """After a failure: drop the gradients of the failed step. No backward of the forward `pending` will run."""

    def begin_forward(self, parameters: Iterable[Parameter], to_train: bool) -> PendingBackward | None:
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

    def squares_of_returned(self, gradients: Iterable[torch.Tensor]) -> float:
        """The sum of the squares of gradients that go to `p.grad`, where they count for the norm of the step."""
        return 0.0


class UpdatesBehindTheDevice(Updates, ABC):
    """Gradients in, updates out, for the parameters of one optimizer: the part that both modes share.

    The host lane runs one piece of work after another. Methods that run on it are marked.
    """

    keeps_wires = True

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        assert options.optimizer is not None  # `Options.build` requires it
        self.optimizer, self.worker = options.optimizer, worker
        self._step: TorchStep | CompiledStep = (
            CompiledStep(self.optimizer, wires, threads, memory) if options.compile_update else TorchStep(self.optimizer, memory)
        )
        self._ledger = GradientLedger(options.update, options.accumulate, memory)
        self._groups = Groups(self.optimizer)
        self._place = Place("the gradients of a step")
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._loaded = earlier_weights.take_loaded(self.optimizer)
        check_layers_are_independent(self.optimizer)
        _updates_of.setdefault(self.optimizer, weakref.WeakSet()).add(self)
        before_step = self.optimizer.register_step_pre_hook(WeakHook(self._before_own_step))
        after_step = self.optimizer.register_step_post_hook(WeakHook(self._after_own_step))
        self._step_hooks = before_step.id, after_step.id
        handles = [
            before_step,
            after_step,
            self.optimizer.register_state_dict_pre_hook(WeakHook(self._before_reading)),
            self.optimizer.register_load_state_dict_pre_hook(WeakHook(self._load)),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)
        weakref.finalize(self, before(self.optimizer, "zero_grad", self._before_zero_grad))
        hear(self)
        weakref.finalize(self, before(self.optimizer, "add_param_group", self.synchronize))

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._ledger.is_idle

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Make `state_dict` of these modules, and of their submodules, wait for updates that are under way."""
        for module in (inner for root in modules for inner in root.modules()):
            if module not in self._watched:
                self._watched.add(module)
                module.register_state_dict_pre_hook(WeakHook(self._before_reading))
                module.register_load_state_dict_pre_hook(WeakHook(self._before_reading))

    @property
    def managed(self) -> set[Parameter]:
        """The parameters of the optimizer, which are updated here."""
        return {p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    @property
    def ranks(self) -> Ranks | None:
        """The ranks among which the optimizer's parameters, frozen or not, are divided; None for one rank (any thread)."""
        return ranks_among(p for group in self.optimizer.param_groups for p in group["params"])

    def begin_forward(self, parameters: Iterable[Parameter], to_train: bool) -> PendingBackward | None:
        """None also if no backward may follow, or if the optimizer has none of the parameters. Raises `L2LError`."""
        if not to_train:
            return None
        put_around_those_of_the_user(self.optimizer, *self._step_hooks)
        trained = {p for p in parameters if p.requires_grad}
        self._refuse_hooks(trained)
        mine = trained & self.managed
        if not mine:
            return None
        if in_data_parallel():
            raise L2LError(
                f"update={self._ledger.update!r} under DistributedDataParallel would update each process by itself: the gradients "
                "never come to p.grad, where they are averaged. Use update='at_step'"
            )
        return self._ledger.open(mine)

    def _refuse_hooks(self, parameters: Iterable[Parameter]) -> None:
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise L2LError(
                f"{len(hooked)} parameters have gradient hooks, which cannot run with update={self._ledger.update!r}: the "
                "gradients never come to p.grad. Remove the hooks, or use update='at_step'"
            )

    def wait(self, parameters: Iterable[Parameter]) -> None:
        self.worker.raise_failure()

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        """Raises `L2LError` if the step has too many backward calls, or one ran twice."""
        if pending is not None:
            self._ledger.begin_backward(pending, pushes)

    def synchronize(self) -> None:
        self._drain()
        self._groups.commit()

    def _drain(self) -> None:
        try:
            self.worker.drain()
        except Exception:  # an interrupt of the wait leaves the updates under way
            self.forget()
            raise

    def forget(self, pending: PendingBackward | None = None) -> None:
        self.worker.accesses.write(self._place)
        self._ledger.forget()
        if pending is not None:  # the traceback of the failure may keep it alive
            self._ledger.close(pending)

    def _before_reading(self, *_: Any) -> None:
        self.synchronize()
        if self.worker.accesses.watches:
            self.worker.accesses.read_parameters(self.managed)

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer loads a checkpoint. Returns it without the weights that a run with delay=1 has added."""
        self._before_reading()
        self._loaded, plain = earlier_weights.take(optimizer, state_dict)
        return plain

    def _before_zero_grad(self) -> None:
        """`optimizer.zero_grad()` is called: a step that has begun starts again. Raises `L2LError` if it has made updates."""
        if self._ledger.has_begun:
            if self._updates_have_begun():
                raise L2LError(
                    f"optimizer.zero_grad() between backward and optimizer.step() would leave the step out, but update={self._ledger.update!r} "
                    "has made its updates already: call optimizer.step(), which ends the step, load a checkpoint into the optimizer, or use "
                    "update='in_forward'"
                )
            self._drain()
            self.forget()

    def before_zero_grad_of(self, module: torch.nn.Module) -> None:
        """As `_before_zero_grad`, for a module. Raises `L2LError` within a step if it has only some of the parameters."""
        if self._ledger.has_begun:
            theirs = self.managed.intersection(module.parameters())
            if theirs and theirs != self.managed:
                raise L2LError(
                    f"zero_grad() of a module with {len(theirs)} of the optimizer's {len(self.managed)} parameters, after a backward of this "
                    f"step: update={self._ledger.update!r} drops the gradients of all of them, or none. Call optimizer.zero_grad()"
                )
            if theirs:
                self._before_zero_grad()

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `L2LError` if another optimizer with the same parameters was stepped at the end of a step."""
        if optimizer is self.optimizer or not self._ledger.complete:
            return
        shared = self.managed.intersection(p for group in optimizer.param_groups for p in group["params"])
        if shared:
            raise L2LError(
                f"{type(optimizer).__name__}.step() found no gradients of {len(shared)} parameters: the option optimizer is another "
                f"{type(self.optimizer).__name__}, and update={self._ledger.update!r} gives them to that one. Compile the model again with "
                f"the optimizer that is stepped, or call step() of the one that it was compiled with{self._ledger.never_stepped}"
            )

    def before_scaled_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `L2LError` within a step: gradients that are collected here would keep the scale of a `GradScaler`."""
        if optimizer is self.optimizer and self._ledger.has_begun:
            raise L2LError(
                f"torch.amp.GradScaler around update={self._ledger.update!r}, whose gradients never come to p.grad, where they are unscaled: "
                "leave it out (precision='fp16' scales the loss by itself), or use update='at_step'"
            )

    def _updates_have_begun(self) -> bool:
        """Whether the step that has begun may have updated parameters."""
        return False

    def _before_own_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """`optimizer.step()` is called, which ends a step. Its own code then finds no gradients of the compiled model."""
        if any(a is not None for a in (*arguments[1:], *named.values())):
            raise L2LError(
                f"optimizer.step(closure) runs the model again within the step, which update={self._ledger.update!r} cannot "
                "follow: leave out the options optimizer and update"
            )
        ends_a_step = self._ledger.has_begun
        if ends_a_step:
            self._check_that_no_other_model_takes_part()
            self._groups.forget_own_steps()
            self.synchronize()
        else:
            self._before_step_of_others()
        groups = self._groups.begin_own_step()
        if ends_a_step:
            self.worker.accesses.write(self._place)
            self._ledger.end_step()
            self._end_step(groups)

    def _check_that_no_other_model_takes_part(self) -> None:
        """Raise `L2LError` if two compiled models take part in this step, and share parameters or clip by one norm."""
        for other in _updates_of[self.optimizer]:
            if other is not self and other._ledger.has_begun:
                shared = len(self._ledger.trained & other._ledger.trained)
                if shared or self.clips or other.clips:
                    why = f"train {shared} of the same parameters" if shared else "are to be clipped by one norm"
                    raise L2LError(
                        f"two compiled models {why} in one step of an optimizer, but each makes its own updates: compile one module that "
                        "holds both, or use update='at_step'"
                    )

    @property
    def clips(self) -> bool:
        """Whether gradients of this step are clipped."""
        return False

    def _before_step_of_others(self) -> None:
        """`optimizer.step()` is called, and the compiled model has no part in it."""

    def _after_own_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        self._groups.end_own_step()

    @abstractmethod
    def _end_step(self, groups: Hyperparameters) -> None:
        """All backward calls of a step have been made; `groups` are the hyperparameters of `optimizer.step()`."""

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        self.worker.accesses.write(self._place)
        self._ledger.collect(pending, segment)

    def _step_layer(self, gradients: Mapping[Parameter, torch.Tensor], factor: float, groups: Hyperparameters) -> None:
        """The optimizer's step on these parameters alone, with these gradients times a factor."""
        if gradients:
            self.worker.accesses.write_parameters(gradients)
            with apart_from_compilation():  # optimizers compute differently while something is compiled
                self._groups.counted(groups, self._step.on(groups, gradients, factor))


_updates_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[UpdatesBehindTheDevice]] = (
    weakref.WeakKeyDictionary()
)


def wait_for_other_models(mine: Updates, parameters: Iterable[Parameter]) -> None:
    """Block until updates of these parameters that other compiled models have put off can be seen."""
    read = set(parameters)
    for other in [each for of_one in list(_updates_of.values()) for each in list(of_one)]:
        if other is not mine and not other.managed.isdisjoint(read):
            other.synchronize()


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """The sum of the squares of all entries, which are summed in float32 at least."""
    norms = (torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients)
    return sum(float(norm.double() ** 2) for norm in norms)
