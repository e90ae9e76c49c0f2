"""Updates that run while the device computes: what `in_backward` and `in_forward` share."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from l2l_compile.errors import L2LError, ReentryError
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.hooks import StepHook, WeakHook, before, remove_with, running_steps, subscribe, wrap_user_hooks
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.host.step.groups import Groups
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import Hyperparameters, TorchStep
from l2l_compile.host.step.trial import check_layers_are_independent
from l2l_compile.host.updates import earlier_weights
from l2l_compile.host.updates.asked_by_the_loop import AskedByTheLoop
from l2l_compile.host.updates.eager_gradients import EagerGradients
from l2l_compile.host.updates.gradient_ledger import GradientLedger, Parameter, PendingBackward, Pushed
from l2l_compile.host.updates.interface import Updates
from l2l_compile.host.watched_parameters import ParameterWatch, watch_compiled_code
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Worker
from l2l_compile.memory.finalizers import items, members
from l2l_compile.options import Options
from l2l_compile.races import Place
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.reentry import check, whole
from l2l_compile.torch_internals.autograd import backward_is_running, behind_this_backward, in_data_parallel
from l2l_compile.torch_internals.threads import apart_from_compilation


class OverlappedUpdates(AskedByTheLoop, Updates):
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
        self._ledger = GradientLedger(options.update, options.accumulate, memory, WeakHook(self._another_optimizer_has_them))
        self._groups = Groups(self.optimizer)
        self._eager, self._watch = EagerGradients(), ParameterWatch(self)
        self._said: set[str] = set()
        self._place = Place("the gradients of a step")
        self._watched = weakref.WeakSet()
        check_needs_no_closure(self.optimizer, f"update={options.update!r}")
        check_layers_are_independent(self.optimizer)
        self._loaded = earlier_weights.take_loaded(self.optimizer)
        _updates_of.setdefault(self.optimizer, weakref.WeakSet()).add(self)
        before_step = self.optimizer.register_step_pre_hook(StepHook(self._before_own_step))
        after_step = self.optimizer.register_step_post_hook(StepHook(self._after_own_step))
        self._step_hooks = before_step.id, after_step.id
        handles = [
            before_step,
            after_step,
            self.optimizer.register_state_dict_pre_hook(WeakHook(self._before_reading)),
            self.optimizer.register_load_state_dict_pre_hook(WeakHook(self._before_loading)),
        ]
        for handle in handles:
            remove_with(self, handle.remove)
        remove_with(self, before(self.optimizer, "zero_grad", self._before_zero_grad))
        subscribe(self)
        watch_compiled_code()
        weakref.finalize(self, self._watch.end)
        remove_with(self, before(self.optimizer, "add_param_group", self._before_reading))

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
        """The ranks among which the optimizer's parameters, frozen or not, are sharded; None for one rank (any thread)."""
        return ranks_among(p for group in self.optimizer.param_groups for p in group["params"])

    def begin_forward(self, parameters: Iterable[Parameter], to_train: bool) -> PendingBackward | None:
        """None also if no backward may follow, or if the optimizer has none of the parameters. Raises `L2LError`."""
        if not to_train:
            return None
        wrap_user_hooks(self.optimizer, *self._step_hooks)
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
            self._watch.end()
            self._take_back()
            self._ledger.begin_backward(pending, pushes)

    def end_backward(self, pending: PendingBackward) -> None:
        """Watch the parameters when the whole backward is over."""
        behind_this_backward(WeakHook(self.watch_again))

    def synchronize(self) -> None:
        self._drain()
        self._groups.commit()
        if self._watch.waits_for_entries:
            self.watch_again()

    def _drain(self) -> None:
        self.worker.drain(self.forget)

    def forget(self, pending: PendingBackward | None = None) -> None:
        self.worker.accesses.write(self._place)
        self._ledger.forget()
        if pending is not None:  # the traceback of the failure may keep it alive
            self._ledger.close(pending)

    @whole("state_dict(), load_state_dict() or add_param_group()")
    def _before_reading(self, *_: Any, **__: Any) -> None:
        """Code of the user is about to read or replace parameters or state. Raises `ReentryError`."""
        check()
        if self._updates_have_begun() and backward_is_running():
            raise ReentryError(
                f"state_dict() within a backward, and update={self._ledger.update!r} has updated some layers and not the others: it would save "
                "half of a step. A signal handler sets a flag alone, and the loop saves behind optimizer.step(): docs/saving.md has an example"
            )
        self._wait_for_reading()

    def _wait_for_reading(self) -> None:
        self.synchronize()
        if self.worker.accesses.watches:
            self.worker.accesses.read_parameters(self.managed)

    @whole("load_state_dict()")
    def _before_loading(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        check()
        return self._load(optimizer, state_dict)

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer loads a checkpoint. Returns it without the weights that a run with delay=1 has added."""
        self._wait_for_reading()
        self._loaded, plain = earlier_weights.take(optimizer, state_dict)
        return plain

    @whole("optimizer.zero_grad()")
    def _before_zero_grad(self, set_to_none: bool = True, *_: Any, **__: Any) -> None:
        """`optimizer.zero_grad()` is called: a step that has begun starts again. Raises `L2LError` if it has made updates."""
        check()
        self._zero(set_to_none)

    def _zero(self, set_to_none: bool) -> None:
        if self._ledger.has_begun:
            self._leave_out(set_to_none)
        self._eager.zeroed(set_to_none, ())
        if not self._watch.waits_for_entries:
            self._watch.end()

    def _leave_out(self, set_to_none: bool) -> None:
        """Drop the gradients of the step that has begun. Raises `L2LError` if it has made updates."""
        if self._updates_have_begun():
            raise L2LError(
                f"optimizer.zero_grad() between backward and optimizer.step() would leave the step out, but update={self._ledger.update!r} "
                "has made its updates already: call optimizer.step(), which ends the step, load a checkpoint into the optimizer, or use "
                "update='in_forward'"
            )
        self._drain()
        arrived = self._ledger.arrived
        self.forget()
        self._eager.zeroed(set_to_none, arrived)

    @whole("zero_grad()")
    def before_zero_grad_of(self, module: torch.nn.Module, set_to_none: bool) -> None:
        """As `_before_zero_grad`, for a module. Raises `L2LError` within a step if it has only some of the parameters."""
        if self._ledger.has_begun:
            theirs = self.managed.intersection(module.parameters())
            if theirs and theirs != self.managed:
                raise L2LError(
                    f"zero_grad() of a module with {len(theirs)} of the optimizer's {len(self.managed)} parameters, after a backward of this "
                    f"step: update={self._ledger.update!r} drops the gradients of all of them, or none. Call optimizer.zero_grad()"
                )
            if theirs:
                check()
                self._zero(set_to_none)
        elif self._eager.used or self._eager.zeros:
            self._eager.zeroed(set_to_none, (), among=set(module.parameters()))

    def before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer's step looks at gradients. That is an error behind it, in `after_step_of`, if they are missing."""

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `L2LError` if another optimizer with the same parameters was stepped at the end of a step."""
        if optimizer is not self.optimizer and self._ledger.complete and (shared := self._shared_with(optimizer)):
            raise L2LError(
                f"{type(optimizer).__name__}.step() found no gradients of {len(shared)} parameters: the option optimizer is another "
                f"{type(self.optimizer).__name__}, and update={self._ledger.update!r} gives them to that one. Compile the model again with "
                f"the optimizer that is stepped, or call step() of the one that it was compiled with{self._ledger.never_stepped}"
            )

    def _shared_with(self, optimizer: torch.optim.Optimizer) -> set[Parameter]:
        """The parameters that another optimizer has as well."""
        return self.managed.intersection(p for group in optimizer.param_groups for p in group["params"])

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

    @whole("optimizer.step()")
    def _before_own_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """`optimizer.step()` is called, which ends a step. Its own code then finds no gradients of the compiled model."""
        check()
        if any(a is not None for a in (*arguments[1:], *named.values())):
            raise L2LError(
                f"optimizer.step(closure) runs the model again within the step, which update={self._ledger.update!r} cannot "
                "follow: leave out the options optimizer and update"
            )
        for each in members(_updates_of[self.optimizer]):
            each._watch.end()
        if self._ledger.has_begun:
            self._check_that_no_other_model_takes_part()
            self._groups.forget_own_steps()
            self.synchronize()
            groups = self._groups.begin_own_step()
            self.worker.accesses.write(self._place)
            self._take_back()
            arrived = self._ledger.arrived
            self._ledger.end_step()
            self._end_step(groups, self._zeros_without(arrived))
            self._eager.stepped(arrived)
            self._check_gradients_from_outside()
            return
        zeros: list[Parameter] = []
        if running_steps(self.optimizer) == 1:
            self._refuse_a_second_step()
            if not (zeros := self._zeros_without(())):
                self._before_step_of_others()
        groups = self._groups.begin_own_step(is_undone=bool(zeros))
        if zeros:
            self._step_on_zeros(groups, zeros)

    def _step_on_zeros(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """A step that no backward belongs to, behind `zero_grad(set_to_none=False)`."""
        self.synchronize()
        self._end_step(groups, zeros)

    def _check_gradients_from_outside(self) -> None:
        """Raise `L2LError` for gradients in `p.grad` that come too late for the step."""

    def _check_that_no_other_model_takes_part(self) -> None:
        """Raise `L2LError` if two compiled models take part in this step, and share parameters or clip by one norm."""
        for other in members(_updates_of[self.optimizer]):
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
        """`optimizer.step()` is called, and no gradient came from the compiled model."""

    @whole("optimizer.step()")
    def _after_own_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        self._groups.end_own_step()
        if running_steps(self.optimizer) == 1:
            self._watch_now()

    @abstractmethod
    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """All backward calls of a step have been made; `groups` are the hyperparameters of `optimizer.step()`.

        `zeros` are parameters without a gradient that are updated with a gradient of zeros.
        """

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


_updates_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[OverlappedUpdates]] = weakref.WeakKeyDictionary()


def wait_for_other_models(mine: Updates, parameters: Iterable[Parameter]) -> None:
    """Block until updates of these parameters that other compiled models have put off can be seen."""
    read = set(parameters)
    for other in updates_of_others(mine):
        if not other.managed.isdisjoint(read):
            other.synchronize()


def updates_of_others(mine: Updates) -> list[OverlappedUpdates]:
    """The overlapped updates of all other compiled models."""
    return [each for _, of_one in items(_updates_of) for each in members(of_one) if each is not mine]
