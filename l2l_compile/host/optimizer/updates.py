"""When a parameter is updated: the life of gradients on the host between a backward and the optimizer.

A *use* is one forward that a backward may follow. A *round* is over when no use is left open: one backward call, or
several that were joined. After `accumulate` rounds,

    in_backward   a parameter is updated as soon as its last gradient of the last round is on the host
    in_forward    `optimizer.step()` looks at all gradients (their norm, whether they are finite), and the parameters
                  are updated in the order in which the next forward fetches them

Everything here runs on the host lane, one piece of work after another, except what says otherwise.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import L2LError
from ...frontend.dynamo import apart_from_compilation, in_data_parallel
from ...ir.captured import Part
from ...options import Options
from ..gradients import GradientMemory
from ..hooks import weakly
from ..worker import Ticket, Worker
from .compiled_step import CompiledStep
from .loss_scale import LossScale
from .torch_step import Hyperparameters, TorchStep, check_layers_are_independent, hyperparameters

Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Pushed:
    """What a segment hands over of a parameter, or of a part of it: a gradient, or None where there is none."""

    parameter: Parameter
    gradient: torch.Tensor | None
    part: Part | None


class PendingBackward:
    """A forward that took part in a step.

    parameters  those that the optimizer trains and this forward reads
    pushes      how often backward will still hand over a gradient of each
    settled     those that no other forward waits for
    last        whether its backward belongs to the last round of the step
    groups      the hyperparameters when its backward began
    """

    def __init__(self, updates: Updates, parameters: Iterable[Parameter]):
        self.updates, self.parameters = updates, frozenset(parameters)
        self.open = True
        self.pushes: Counter[Parameter] = Counter()
        self.settled: set[Parameter] = set()
        self.last = self.ends_round = False
        self.groups: Hyperparameters = []
        self.sums: dict[Parameter, torch.Tensor] = {}

    def __del__(self) -> None:
        self.updates.close(self)


class Updates:
    """Gradients in, updates out, for the parameters of one optimizer."""

    def __init__(self, options: Options, worker: Worker, step: TorchStep | CompiledStep, memory: GradientMemory):
        self.options, self.worker, self._step, self._memory = options, worker, step, memory
        self.optimizer: torch.optim.Optimizer = options.optimizer
        self.scale = LossScale() if options.precision == "fp16" else None
        self.norm = 0.0
        self.skipped = 0
        self._lock = threading.Lock()
        self._uses: Counter[Parameter] = Counter()
        self._gradients: dict[Parameter, torch.Tensor] = {}
        self._pushed: dict[tuple[Parameter, ...], None] = {}  # the segments of this step, in the order of backward
        self._rounds = 0
        self._squares = 0.0
        self._before: Hyperparameters = []
        self._after: Hyperparameters = []
        self._snapshots: list[Hyperparameters] = []
        self._order: dict[Parameter, int] = {}  # of the model's parameters: norms are summed in it
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._tickets: dict[Parameter, Ticket] = {}
        self._decision: Ticket | None = None  # what is known of the last step's gradients (in_forward)
        check_layers_are_independent(self.optimizer)
        handles = [
            self.optimizer.register_step_pre_hook(weakly(self._before_step)),
            self.optimizer.register_step_post_hook(weakly(self._after_step)),
            self.optimizer.register_state_dict_pre_hook(weakly(self._before_reading)),
            self.optimizer.register_load_state_dict_pre_hook(weakly(self._before_reading)),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Make `state_dict` of these modules, and of those in them, wait for updates that were put off."""
        for root in modules:
            for parameter in root.parameters():
                self._order.setdefault(parameter, len(self._order))
            for module in root.modules():
                if module not in self._watched:
                    self._watched.add(module)
                    module.register_state_dict_pre_hook(weakly(self._before_reading))
                    module.register_load_state_dict_pre_hook(weakly(self._before_reading))

    @property
    def managed(self) -> set[Parameter]:
        """The parameters of the optimizer, which are updated here."""
        return {p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    def use(self, parameters: Iterable[Parameter]) -> PendingBackward | None:
        """A forward through these parameters begins, which a backward may follow; None if the optimizer has none of them."""
        trained = {p for p in parameters if p.requires_grad}
        hooked = [p for p in trained if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise L2LError(
                f"{len(hooked)} parameters have gradient hooks, which cannot run with update={self.options.update!r}: the "
                "gradients never come to p.grad. Remove the hooks, or use update='at_step'"
            )
        mine = trained & self.managed
        if not mine:
            return None
        if in_data_parallel():
            raise L2LError(
                f"update={self.options.update!r} under DistributedDataParallel would update each process by itself: the gradients "
                "never come to p.grad, where they are averaged. Use update='at_step'"
            )
        use = PendingBackward(self, mine)
        with self._lock:
            self._uses.update(use.parameters)
        return use

    def close(self, use: PendingBackward) -> None:
        """No backward will follow a forward any more: it runs now, or the forward is forgotten."""
        with self._lock:
            if use.open:
                use.open = False
                self._uses.subtract(use.parameters)
                self._uses = +self._uses

    def begin_backward(self, use: PendingBackward, pushes: Counter[Parameter]) -> None:
        """A backward begins, which will hand over gradients `pushes[p]` times for each parameter."""
        if not use.open:
            raise L2LError(
                f"backward ran twice through one forward, but update={self.options.update!r} may have changed its weights "
                "in between: use update='at_step' for retain_graph=True"
            )
        if self._rounds >= self.options.accumulate:
            raise L2LError(
                f"{self._rounds + 1} backward calls without optimizer.step() between them, but the option accumulate is "
                f"{self.options.accumulate}: set it to the number of backward calls in a step"
            )
        self.close(use)
        use.pushes, use.groups = pushes, hyperparameters(self.optimizer)
        use.settled = {p for p in use.parameters if p not in self._uses}
        use.last = self._rounds == self.options.accumulate - 1
        use.ends_round = not self._uses
        self._rounds += use.ends_round

    def wait_for_norm(self) -> None:
        """Block until the gradients of the last step have been looked at: `norm`, `skipped` and `scale` are its own."""
        if self._decision is not None:
            self._decision.wait()

    def wait(self, parameters: Iterable[Parameter]) -> None:
        """Block until the updates of these parameters that were put off are done."""
        for parameter in parameters:
            if (ticket := self._tickets.get(parameter)) is not None:
                ticket.wait()
        self.worker.raise_failure()

    def synchronize(self) -> None:
        """Block until every update made so far can be seen. Raises what an update has raised."""
        self._drain()
        self._commit_groups()

    def _drain(self) -> None:
        try:
            self.worker.drain()
        except BaseException:
            self.forget()
            raise
        self._tickets.clear()

    def _before_reading(self, *_: Any) -> None:
        self.synchronize()

    def forget(self) -> None:
        """After a failure: drop the gradients of the step that failed."""
        self._gradients.clear()
        self._pushed.clear()
        self._tickets.clear()
        self._rounds, self._squares = 0, 0.0

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """`optimizer.step()` is called: the end of a step. What it does itself then finds no gradients of ours."""
        if any(a is not None for a in (*arguments[1:], *named.values())):
            raise L2LError(
                f"optimizer.step(closure) runs the model again within the step, which update={self.options.update!r} cannot "
                "follow: leave out the options optimizer and update"
            )
        if self._rounds:
            self._snapshots.clear()  # a step that failed may have left some
            self._drain()
            if self.options.update == "in_forward":
                self._commit_groups()
        self._snapshots.append(hyperparameters(optimizer))
        if not self._rounds:
            return
        if self._rounds != self.options.accumulate:
            rounds = self._rounds
            self.forget()
            raise L2LError(
                f"optimizer.step() after {rounds} backward calls, but the option accumulate is {self.options.accumulate}: "
                "set it to the number of backward calls in a step. The gradients so far were dropped"
            )
        if self.options.update == "in_backward":
            self._end_of_step_in_backward()
        else:
            self._put_off_updates()
        self._rounds = 0

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: tuple, named: dict) -> None:
        """The optimizer's own step had no gradients: what it counts in its groups is counted by the layers' steps."""
        if not self._snapshots:
            return
        for group, before in zip(optimizer.param_groups, self._snapshots.pop(), strict=True):
            for name in set(group) - set(before) - {"params"}:
                del group[name]
            group.update({k: v for k, v in before.items() if not isinstance(v, torch.Tensor)})
        if not self._snapshots and self.options.update == "in_backward":  # a step may call that of its base class
            self._commit_groups()

    def _commit_groups(self) -> None:
        for group, before, after in zip(self.optimizer.param_groups, self._before, self._after, strict=False):
            for name, value in after.items():
                if not isinstance(value, torch.Tensor) and value != before.get(name):
                    group[name] = value
        self._after = []

    def _end_of_step_in_backward(self) -> None:
        self.norm, self._squares = math.sqrt(self._squares), 0.0
        outside = [p for p in self.managed if p.grad is not None]
        if outside:
            raise L2LError(
                f"{len(outside)} parameters also have a gradient from outside of the compiled model, after update='in_backward' "
                "has updated them: use update='in_forward' or 'at_step'"
            )

    def _put_off_updates(self) -> None:
        for parameter in self._gradients:
            if parameter.grad is not None:  # from outside of the compiled model
                self._gradients[parameter] = self._gradients[parameter].float() + parameter.grad
                parameter.grad = None
        gradients, self._gradients = self._gradients, {}
        versions = {p: p._version for p in gradients}
        groups = self._snapshots[-1]
        decision: dict[str, float] = {}
        self._decision = self.worker.submit(lambda: decision.update(factor=self._look_at(gradients)))
        for segment in [*reversed(self._pushed), tuple(gradients)]:  # a shared parameter goes with its first reader
            mine = {p: gradients[p] for p in segment if p in gradients and p not in self._tickets}
            ticket = self.worker.submit(lambda mine=mine: self._apply(mine, decision["factor"], groups, versions))
            self._tickets.update(dict.fromkeys(mine, ticket))
        self._pushed.clear()

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, use: PendingBackward, segment: Sequence[Pushed]) -> None:
        """The gradients of a segment are on the host; those of a shared parameter add up."""
        self._pushed.setdefault(tuple(pushed.parameter for pushed in segment))
        for pushed in segment:
            parameter = pushed.parameter
            use.pushes[parameter] -= 1
            if pushed.gradient is not None:
                use.sums[parameter] = self._memory.collected(use.sums.get(parameter), pushed.gradient, parameter, pushed.part)
            if use.pushes[parameter] == 0 and parameter in use.sums:
                before, whole = self._gradients.get(parameter), use.sums.pop(parameter)
                self._gradients[parameter] = self._memory.added(before, whole, parameter.dtype)

    def update(self, use: PendingBackward, parameters: Iterable[Parameter]) -> None:
        """Update those of these parameters whose gradients are complete (in_backward)."""
        if not use.last:
            return
        due = [p for p in dict.fromkeys(parameters) if p in self._gradients and p in use.settled and use.pushes[p] == 0]
        gradients = {p: self._gradients.pop(p) for p in due}
        squares = sum_of_squares(self._memory.widened(g, p.dtype) for p, g in gradients.items())
        if not math.isfinite(squares):
            raise L2LError(
                "a gradient is not finite, and update='in_backward' has already updated the layers above: "
                "update='in_forward' looks at all gradients first and skips such a step"
            )
        self._squares += squares
        self._apply(gradients, 1.0, use.groups)

    def end_backward(self, use: PendingBackward) -> None:
        """A backward is over; in_backward, what only earlier rounds gave a gradient is updated as well."""
        if use.ends_round and self.options.update == "in_backward":
            self.update(use, list(self._gradients))

    def _look_at(self, gradients: dict[Parameter, torch.Tensor]) -> float:
        """The factor for all gradients of a step: 1 / loss scale, and clipping; 0 where the step is skipped."""
        scale = self.scale.value if self.scale is not None else 1.0
        ordered = sorted(gradients, key=lambda p: self._order.get(p, len(self._order)))
        norms = [torch.linalg.vector_norm(self._memory.widened(gradients[p], p.dtype)) for p in ordered]  # one copy at a time
        norm = torch.nn.utils.get_total_norm(norms) / scale
        finite = bool(torch.isfinite(norm))
        if self.scale is not None:
            self.scale.update(overflow=not finite)
        self.norm = float(norm)
        if not finite:
            self.skipped += 1
            if self.scale is None:  # a loss scale that was too large is no news
                warnings.warn(
                    f"the gradients' norm is {self.norm}, so this step updates nothing (stats().skipped_steps counts such steps)",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return 0.0
        most = self.options.max_grad_norm
        clip = torch.clamp(most / (norm + 1e-6), max=1.0) if most is not None else 1.0  # as clip_grad_norm_ does
        return float(clip / scale)

    def _apply(
        self,
        gradients: dict[Parameter, torch.Tensor],
        factor: float,
        groups: Hyperparameters,
        versions: Mapping[Parameter, int] | None = None,
    ) -> None:
        if factor == 0.0 or not gradients:
            return
        if versions is not None and any(p._version != versions[p] for p in gradients):
            raise L2LError(
                "a parameter was written while its update was still to come: with update='in_forward', call "
                "l2l_compile.synchronize(model) before you write into parameters"
            )
        with apart_from_compilation():  # optimizers compute otherwise while something is compiled
            self._before, self._after = groups, self._step.on(groups, gradients, factor)


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """The sum of the squares of all entries, which are summed in float32 at least."""
    norms = (torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients)
    return sum(float(norm.double() ** 2) for norm in norms)
