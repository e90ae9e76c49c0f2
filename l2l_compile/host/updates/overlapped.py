"""Updates that run while the device computes: what `in_backward` and `in_forward` share."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.hooks import WeakHook, running_steps
from l2l_compile.host.resumable_run import ResumableRun
from l2l_compile.host.run_contents import Contents, Earlier
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.host.step.groups import Groups
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import Hyperparameters, TorchStep
from l2l_compile.host.step.trial import check_layers_are_independent
from l2l_compile.host.stored_copies import StoredCopies
from l2l_compile.host.stored_parameters import StoredParameters
from l2l_compile.host.stored_step import StoredStep, StoredTorchStep
from l2l_compile.host.updates import earlier_weights
from l2l_compile.host.updates.asked_by_the_loop import AskedByTheLoop, refuse_gradient_hooks
from l2l_compile.host.updates.eager_gradients import EagerGradients
from l2l_compile.host.updates.gradient_ledger import GradientLedger, Parameter, PendingBackward, Pushed
from l2l_compile.host.updates.interface import Updates
from l2l_compile.host.updates.optimizer_hooks import OptimizerHooks
from l2l_compile.host.updates.other_models import check_one_model_steps, register, updates_with
from l2l_compile.host.watched_parameters import ParameterWatch, watch_compiled_code
from l2l_compile.host.wire import Wires
from l2l_compile.host.worker import Worker
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.races import Place
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.runtime.stats import Stats
from l2l_compile.torch_internals.autograd import behind_this_backward, in_data_parallel
from l2l_compile.torch_internals.threads import apart_from_compilation


class OverlappedUpdates(AskedByTheLoop, Updates):
    """Gradients in, updates out, for the parameters of one optimizer: the part that both modes share.

    The host lane runs one piece of work after another. Methods that run on it are marked.
    """

    keeps_wires = True

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        assert options.optimizer is not None  # `Options.build` requires it
        self.optimizer, self.worker = options.optimizer, worker
        self._stored = StoredParameters(options, self.optimizer) if options.stores_parameters else None
        self._step = _step_of(options, wires, threads, memory, self._stored)
        if self._stored is not None and not options.delay:
            self.stored_copies = StoredCopies(self._stored.empty_copy, wires, self._stored.has_copy)
        self.ledger = GradientLedger(options.update, options.accumulate, memory, WeakHook(self._another_optimizer_has_them))
        self._groups = Groups(self.optimizer)
        self._eager, self._watch = EagerGradients(), ParameterWatch(self)
        self._said: set[str] = set()
        self._place = Place("the gradients of a step")
        check_needs_no_closure(self.optimizer, f"update={options.update!r}")
        check_layers_are_independent(self.optimizer)
        self._loaded = earlier_weights.take_loaded(self.optimizer)
        register(self)
        self._hooks = OptimizerHooks(self, self.ledger)
        watch_compiled_code()
        weakref.finalize(self, self._watch.end)

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self.ledger.is_idle

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        self._hooks.watch(modules)

    def expect(self, entries: int) -> None:
        if self._stored is not None:
            self._stored.largest_segment = max(self._stored.largest_segment, entries)

    def expect_stashes(self, size: int) -> None:
        if self._stored is not None:
            self._stored.stash_buffers = max(self._stored.stash_buffers, size)

    def place(self, parameters: Sequence[Parameter]) -> None:
        if self._stored is not None:
            mine = {p for p in parameters if p.requires_grad} & self.managed
            if misplaced := self._stored.misplaced(mine):
                self.synchronize()
                self._move(self._stored, misplaced)
                if self.stored_copies is not None:
                    self.stored_copies.place()

    def _move(self, stored: StoredParameters, parameters: Sequence[Parameter]) -> None:
        stored.place(parameters)

    def describe(self, stats: Stats) -> None:
        super().describe(stats)
        self._describe_disk(stats)

    def _describe_disk(self, stats: Stats) -> None:
        if self._stored is not None:
            found = self._stored.figures()
            stats.disk_read_bytes, stats.disk_written_bytes, stats.disk_wait_seconds = found.read, found.written, found.waited

    @property
    def managed(self) -> set[Parameter]:
        """The parameters of the optimizer, which are updated here."""
        return {p for p in parameters_of(self.optimizer) if p.requires_grad}

    @property
    def ranks(self) -> Ranks | None:
        """The ranks among which the optimizer's parameters, frozen or not, are sharded; None for one rank (any thread)."""
        return ranks_among(parameters_of(self.optimizer))

    def begin_forward(self, parameters: Sequence[Parameter], to_train: bool) -> PendingBackward | None:
        """None also if no backward may follow, or if the optimizer has none of the parameters. Raises `L2LError`."""
        self._carry_writes()
        if not to_train:
            return None
        self.commit()
        self._hooks.wrap_user_hooks()
        trained = {p for p in parameters if p.requires_grad}
        refuse_gradient_hooks(trained, self.ledger.update)
        mine = trained & self.managed
        if not mine:
            return None
        if in_data_parallel():
            raise L2LError(
                f"update={self.ledger.update!r} under DistributedDataParallel would update each process by itself: the gradients "
                "never come to p.grad, where they are averaged. Use update='at_step'"
            )
        return self.ledger.open(mine)

    def _finish_writes(self) -> None:
        """Wait until all updates are on the disk. No update is under way. Raises `DiskError`."""
        if self._stored is not None:
            self._stored.finish_writes()

    @property
    def _run(self) -> ResumableRun | None:
        return self._stored.run if self._stored is not None else None

    def _end_step_of_run(self) -> None:
        if self._run is not None:
            self._run.end_step()

    def commit(self, extra: Any = None) -> bool:
        """Have the step that is over committed when its updates were made. False if there is none, or with no option `resumable`."""
        run = self._run
        if run is None or not run.is_over:
            return False
        self._carry_writes()
        taken = run.take(extra)
        self._worker_of_commits.submit(lambda: run.commit(taken, self._add_counts, self._before_of_next_step()))
        return True

    def keep(self, extra: Any, version: str) -> bool:
        """As `commit`, and keep the step under a name. Returns when it is on disk. Raises `DiskError`.

        If the disk has too little room for one more version, nothing is changed, and the step can be committed without a name.
        """
        run = self._run
        if run is None or not run.is_over:
            return False
        self.synchronize()  # the first step makes state, which needs room as well
        run.store.await_commit()
        run.store.make_room_for_a_version()
        self.commit(extra)
        self.await_commit()
        run.store.keep(version)
        return True

    @property
    def _worker_of_commits(self) -> Worker:
        """The lane on which the updates of a step are made."""
        return self.worker

    def _carry_writes(self) -> None:
        """Have updates and fetches see what code of the user has written into weights of a kept version."""
        if self._run is not None:
            self._run.store.carry_writes()

    def await_commit(self) -> None:
        """Wait until the commit that was begun last is done. Raises its error."""
        self.synchronize()
        if self._run is not None:
            self._run.store.await_commit()

    def _begin_updates(self) -> None:
        """From here to the updates of this step, no code of the user writes parameters: they may be read ahead."""
        self._carry_writes()
        if self._stored is not None:
            self._stored.begin_updates()

    def wait(self, parameters: Iterable[Parameter]) -> None:
        self.worker.raise_failure()

    def begin_backward(self, pending: PendingBackward | None, pushes: Counter[Parameter]) -> None:
        """Raises `L2LError` if the step has too many backward calls, or one ran twice."""
        if pending is not None:
            self._watch.end()
            self._take_back()
            self.ledger.begin_backward(pending, pushes)

    def end_backward(self, pending: PendingBackward) -> None:
        """Watch the parameters when the whole backward is over."""
        behind_this_backward(WeakHook(self.watch_again))

    def synchronize(self) -> None:
        self._drain()
        self._finish_writes()
        self._groups.commit()
        if self._watch.waits_for_entries:
            self.watch_again()

    def stop_watching(self) -> None:
        """Give the parameters back to PyTorch's own class: what the caller asks of them from now on is right without a watch."""
        self._watch.end()

    def _drain(self) -> None:
        self.worker.drain(self.forget)

    def forget(self, pending: PendingBackward | None = None) -> None:
        if self._stored is not None:
            self._stored.forget()
        self.worker.accesses.write(self._place)
        self.ledger.forget()
        if pending is not None:  # the traceback of the failure may keep it alive
            self.ledger.close(pending)

    def wait_for_reading(self) -> None:
        self.synchronize()
        if self.worker.accesses.watches:
            self.worker.accesses.read_parameters(self.managed)

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer loads a checkpoint. Returns it without the weights that a run with delay=1 has added."""
        self.wait_for_reading()
        self._loaded, plain = earlier_weights.take(optimizer, state_dict)
        return plain

    def zero(self, set_to_none: bool) -> None:
        if self.ledger.has_begun:
            self._leave_out(set_to_none)
        self._eager.zeroed(set_to_none, ())
        if not self._watch.waits_for_entries:
            self._watch.end()

    def zero_outside_of_a_step(self, parameters: Iterable[Parameter], set_to_none: bool) -> None:
        if self._eager.used or self._eager.zeros:
            self._eager.zeroed(set_to_none, (), among=set(parameters))

    def _leave_out(self, set_to_none: bool) -> None:
        """Drop the gradients of the step that has begun. Raises `L2LError` if it has made updates."""
        if self.has_begun_to_update():
            raise L2LError(
                f"optimizer.zero_grad() between backward and optimizer.step() would leave the step out, but update={self.ledger.update!r} "
                "has made its updates already: call optimizer.step(), which ends the step, load a checkpoint into the optimizer, or use "
                "update='in_forward'"
            )
        self._drain()
        arrived = self.ledger.of_step.arrived
        self.forget()
        self._eager.zeroed(set_to_none, arrived)

    def begin_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """As in `HookedUpdates`."""

    def has_begun_to_update(self) -> bool:
        """Whether the step that has begun may have updated parameters."""
        return False

    def begin_own_step(self) -> None:
        for each in updates_with(self.optimizer):
            each.stop_watching()
        if self.ledger.has_begun:
            check_one_model_steps(self)
            self._groups.forget_own_steps()
            self._await_updates()
            groups = self._groups.begin_own_step()
            self.worker.accesses.write(self._place)
            self._take_back()
            arrived = self.ledger.of_step.parameters
            self.ledger.end_step()
            self._end_step(groups, self._zeros_without(arrived))
            self._end_step_of_run()
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

    def _await_updates(self) -> None:
        """`optimizer.step()` is called: wait for the updates before it. The disk goes on: who reads parameters waits for their writes."""
        self._drain()
        self._groups.commit()

    def end_own_step(self) -> None:
        self._groups.end_own_step()
        if running_steps(self.optimizer) == 1:
            self._watch_now()

    def _step_on_zeros(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """A step that no backward belongs to, behind `zero_grad(set_to_none=False)`."""
        self.synchronize()
        self._end_step(groups, zeros)
        self._end_step_of_run()

    def _check_gradients_from_outside(self) -> None:
        """Raise `L2LError` for gradients in `p.grad` that come too late for the step."""

    @property
    def clips(self) -> bool:
        """Whether gradients of this step are clipped."""
        return False

    def _before_step_of_others(self) -> None:
        """`optimizer.step()` is called, and no gradient came from the compiled model. Raises `L2LError` with the option `resumable`.

        With other gradients, the optimizer's own step writes parameters: updates, and their writes, may be under way.
        """
        if not any(p.grad is not None for p in parameters_of(self.optimizer)):
            return
        self.synchronize()
        if self._run is not None:
            raise L2LError(
                "optimizer.step() on gradients that are not of the compiled model would write into the last complete step on disk, which the option "
                "'resumable' keeps: let a backward of the compiled model be part of each step, or leave out 'resumable'"
            )

    @abstractmethod
    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """All backward calls of a step have been made; `groups` are the hyperparameters of `optimizer.step()`.

        `zeros` are parameters without a gradient that are updated with a gradient of zeros.
        """

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        self.worker.accesses.write(self._place)
        self.ledger.collect(pending, segment)

    def _before_of_next_step(self) -> Earlier:
        """With `delay=1`, the weights that the next step reads, of parameters in memory, as far as they are not the newest ones."""
        return {}

    def _add_counts(self, contents: Contents) -> None:
        """Add what the updates of a step have counted, and its loss scale."""
        self._groups.put_into(contents.groups, contents.named)
        if self.scale is not None:
            self.scale.put_into(contents.groups[0])

    def _step_layer(self, gradients: Mapping[Parameter, torch.Tensor], factor: float, groups: Hyperparameters) -> None:
        """The optimizer's step on these parameters alone, with these gradients times a factor."""
        if gradients:
            self.worker.accesses.write_parameters(gradients)
            with apart_from_compilation():  # optimizers compute differently while something is compiled
                self._groups.counted(groups, self._step.on(groups, gradients, factor))


def _step_of(
    options: Options, wires: Wires, threads: int, memory: GradientMemory, stored: StoredParameters | None
) -> TorchStep | CompiledStep:
    """The optimizer's step on some parameters, compiled or not, in memory or on disk."""
    optimizer = options.optimizer
    assert optimizer is not None
    if stored is None:
        return CompiledStep(optimizer, wires, threads, memory) if options.compile_update else TorchStep(optimizer, memory)
    if options.compile_update:
        return StoredStep(optimizer, wires, threads, memory, stored)
    return StoredTorchStep(optimizer, wires, memory, stored)
