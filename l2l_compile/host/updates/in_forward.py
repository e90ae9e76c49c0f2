"""`update="in_forward"`: `optimizer.step()` looks at all gradients, and parameters are updated while the next forward runs."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.sharded_state import counts_here, summed_over
from l2l_compile.host.step.torch_step import Hyperparameters
from l2l_compile.host.updates.deferred import DeferredWriteGuard
from l2l_compile.host.updates.deferred_updates import DeferredUpdates
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward, Pushed, StepGradients
from l2l_compile.host.updates.loss_scale import LossScale
from l2l_compile.host.updates.norms import norm_of, total_norm
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.host.watched_parameters import unwatched
from l2l_compile.host.wire import Wires, written_values
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.races import Place
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.sharded import local, sharded_as
from l2l_compile.ranks.stage_norms import in_order_of_model
from l2l_compile.runtime.stats import Stats

_Norms = dict[Parameter, tuple[torch.Tensor, torch.Tensor]]  # complete gradients of a step, and their norms


@dataclass(eq=False)
class DeferredStep:
    """A step whose updates are put off. It holds no gradients, so the gradients of a segment are freed after its update.

    groups    the hyperparameters at `optimizer.step()`
    guard     the parameters as they were then
    max_norm  the norm to which gradients are clipped, None for no clipping
    scale     the loss scale that is in its gradients; 1 for none
    factor    multiplies all gradients; set by `_look_at`: clipping, 1 / loss scale; 0 if the step is skipped
    """

    groups: Hyperparameters
    guard: DeferredWriteGuard
    max_norm: float | None
    scale: float
    factor: float = 0.0


@dataclass(frozen=True)
class StepFigures:
    """What is known of a step whose gradients have been looked at: their norm, and how many steps were skipped so far."""

    norm: float | None = None
    skipped: int = 0

    def add_to(self, stats: Stats) -> None:
        """Add them to the figures of a model."""
        stats.gradient_squares = None if self.norm is None else self.norm * self.norm
        stats.skipped_steps = self.skipped


class UpdatesInForward(DeferredUpdates):
    """Puts the updates of a step off to the next forward, which waits for a segment's updates before it fetches the segment."""

    wants_norms = True

    def __init__(self, options: Options, worker: Worker, wires: Wires, threads: int, memory: GradientMemory):
        super().__init__(options, worker, wires, threads, memory)
        self._memory, self._max_norm_of_all = memory, options.max_grad_norm
        self._max_norm = self._max_norm_of_all  # of this step
        self.scale = LossScale().keep_with(self.optimizer) if options.precision == "fp16" else None
        self._norm: float | None = None  # of the last step
        self._skipped = 0
        self._order: dict[Parameter, int] = {}  # of the model's parameters, in which norms are summed
        self._looked: Ticket | None = None  # done when the last step's gradients have been looked at
        self._place_of_norm = Place("the norm of a step")
        self._read: set[Parameter] = set()  # whose gradients of this step are in `p.grad`, since the caller has read them there
        self._outside: set[Parameter] = set()  # those that have a gradient from outside of the compiled model as well

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        roots = list(modules)
        super().watch(roots)
        for parameter in (p for root in roots for p in root.parameters()):
            self._order.setdefault(parameter, len(self._order))

    def describe(self, stats: Stats) -> None:
        """Waits until the gradients of the last step have been looked at, and adds their figures."""
        if self._looked is not None:
            self._looked.wait()
        self.worker.accesses.read(self._place_of_norm)
        super().describe(stats)
        self._figures().add_to(stats)

    def _figures(self) -> StepFigures:
        return StepFigures(self._norm, self._skipped)

    def clip(self, max_norm: float) -> None:
        self._max_norm = max_norm

    @property
    def clips(self) -> bool:
        return self._max_norm is not None

    def _before_step_of_others(self) -> None:
        """Clip gradients in `p.grad`, as in a step that has gradients of the compiled model as well."""
        super()._before_step_of_others()
        outside = [p for p in self.managed if p.grad is not None]
        if outside and self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(outside, self._max_norm)
            self._max_norm = self._max_norm_of_all

    def forget(self, pending: PendingBackward | None = None) -> None:
        super().forget(pending)
        self._read.clear()
        self._outside.clear()

    def hand_over(self) -> None:
        if self.ledger.has_begun and not self.is_clipped_by_the_loop:
            for parameter in self.ledger.trained:
                found = parameter.grad  # the property of a watched parameter moves the gradient there
                del found

    def _read_in_step(self, parameter: Parameter, own: torch.Tensor | None) -> torch.Tensor | None:
        """Move the gradient to `p.grad`, where the caller may also change it. The step takes it back."""
        if parameter in self._read:
            return own
        self._read.add(parameter)
        gradient = self._collected(parameter)
        if gradient is None:
            return own
        wide = self._memory.widened(gradient, parameter.dtype)
        wide = wide.div_(self.scale_now()) if self.scale is not None else wide
        if own is not None:
            self._outside.add(parameter)
            wide.add_(local(own))
        return sharded_as(wide, parameter)

    def _write_in_step(self, parameter: Parameter) -> None:
        """The gradient that was collected so far is replaced."""
        if parameter not in self._read:
            self._read.add(parameter)
            self._collected(parameter)

    def _collected(self, parameter: Parameter) -> torch.Tensor | None:
        """Take the gradient of this step so far, when all of it is on the host."""
        OverlappedUpdates._drain(self)  # of the host lane alone
        self.worker.accesses.write(self._place)
        self.ledger.of_step.norms.pop(parameter, None)
        return self.ledger.gradients.pop(parameter, None)

    def _take_back(self) -> None:
        read, self._read = self._read, set()
        for parameter in read:
            if parameter.grad is None:  # the caller has dropped it
                self.ledger.of_step.arrived.discard(parameter)
            elif parameter not in self._outside:
                gradient = local(parameter.grad)
                self.ledger.gradients[parameter] = gradient * self.scale_now() if self.scale is not None else gradient
                parameter.grad = None

    def _end_step(self, groups: Hyperparameters, zeros: Sequence[Parameter]) -> None:
        """Queue a look at all gradients, and then an update for each segment, in the order of the next forward.

        Parameters with a gradient from outside of the compiled model are updated at once: code that reads them there
        does not wait.
        """
        of_step = self.ledger.take_all()
        gradients = of_step.gradients
        outside = self._take_gradients_from_outside(gradients)
        self._outside.clear()
        gradients.update({p: torch.zeros_like(local(p).detach()) for p in zeros})
        self._announce_step()
        step = self._step_of(groups, gradients)
        self._begin_updates()
        first = {p: gradients[p] for p in outside}
        segments = [{p: gradients[p] for p in mine} for mine in self._in_order_of_forward(of_step, but=outside)]
        self._looked = self._updating.submit(functools.partial(self._look_and_leave, step, of_step))
        if first:
            at_once = self._updating.submit(functools.partial(self._update, step, first))
            at_once.wait()
            for parameter in first:
                written_values(parameter)
        while segments:  # each is held by its update alone, and freed with it
            mine = segments.pop(0)
            self._defer(mine, functools.partial(self._update, step, mine))

    def _step_of(self, groups: Hyperparameters, parameters: Iterable[Parameter]) -> DeferredStep:
        """A step of these parameters, which ends now."""
        step = DeferredStep(groups, DeferredWriteGuard(self.optimizer, parameters), self._max_norm, self.scale_now())
        self._max_norm = self._max_norm_of_all
        return step

    def _announce_step(self) -> None:
        summed_over(self.ranks, ActionKind.STEP, ())

    def _take_gradients_from_outside(self, gradients: dict[Parameter, torch.Tensor]) -> list[Parameter]:
        """Move gradients in `p.grad`, from outside of the model, to `gradients`, in their scale. Returns their parameters."""
        outside = {p: p.grad for p in parameters_of(self.optimizer) if p.grad is not None}
        for parameter, gradient in outside.items():
            theirs = local(gradient) * self.scale_now()
            ours = gradients.get(parameter)
            gradients[parameter] = theirs if ours is None else ours.to(parameter.dtype) + theirs
            parameter.grad = None
        return list(outside)

    def _in_order_of_forward(self, of_step: StepGradients, but: Iterable[Parameter] = ()) -> Iterator[list[Parameter]]:
        """The parameters of each segment, without those in `but`. A shared parameter goes with its first reader."""
        taken, gradients = set(but), of_step.gradients
        for segment in [*reversed(of_step.segments), tuple(gradients)]:
            mine = [p for p in dict.fromkeys(segment) if p in gradients and p not in taken]
            taken.update(mine)
            yield mine

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def collect(self, pending: PendingBackward, segment: Sequence[Pushed]) -> None:
        """Take norms as gradients arrive, so that none is left to take between the last gradient and the first update.

        The device has taken that of a gradient that came in one piece.
        """
        parameters = tuple(pushed.parameter for pushed in segment)
        pending.of_step.segments.setdefault(parameters)
        super().collect(pending, segment)
        for parameter in self.ledger.settled(pending, parameters):
            gradient = pending.of_step.gradients[parameter]
            known = next((pushed.norm for pushed in segment if pushed.gradient is gradient), None)
            if known is not None and math.isfinite(known):  # squares may overflow on the device
                norm = torch.tensor(known, dtype=torch.promote_types(gradient.dtype, torch.float32))
            else:
                norm = self._norm_of_one(parameter, gradient)
            pending.of_step.norms[parameter] = gradient, norm

    def _look_and_leave(self, step: DeferredStep, of_step: StepGradients) -> None:
        """Look at a step, and leave its gradients to the updates: a loss that the caller keeps leads to `of_step`."""
        self._look_at(step, of_step)
        of_step.gradients.clear()

    def _look_at(self, step: DeferredStep, of_step: StepGradients) -> None:
        """Set the factor for all gradients of a step."""
        self.worker.accesses.write(self._place_of_norm)
        norm = self._norm_over_ranks(of_step.gradients, of_step.norms) / step.scale
        of_step.norms.clear()  # they hold the gradients as well
        finite = bool(torch.isfinite(norm))
        if self.scale is not None:
            self.scale.update(overflow=not finite, used=step.scale)
        self._norm = float(norm)
        if not finite:
            self._skip_step()
            return
        clip = torch.clamp(step.max_norm / (norm + 1e-6), max=1.0) if step.max_norm is not None else 1.0  # as clip_grad_norm_
        step.factor = float(clip / step.scale)

    def _norm_over_ranks(self, gradients: Mapping[Parameter, torch.Tensor], known: _Norms) -> torch.Tensor:
        """The global norm of gradients of which each rank has shards, with the same bits on every rank."""
        ranks = self.ranks
        if isinstance(ranks, PipelineRanks):
            return total_norm(in_order_of_model(self._norms_of(gradients, known), ranks, ranks.sum_on_host))
        norm = self._norm_of({p: g for p, g in gradients.items() if counts_here(p, ranks)}, known)
        if ranks is None:
            return norm
        (squares,) = ranks.sum_on_host([float(norm.double() ** 2)])
        return torch.tensor(squares, dtype=torch.float64).sqrt()

    def _norm_of(self, gradients: Mapping[Parameter, torch.Tensor], known: _Norms) -> torch.Tensor:
        """The global norm, summed in the order of the model's parameters."""
        return total_norm(list(self._norms_of(gradients, known).values()))

    def _norms_of(self, gradients: Mapping[Parameter, torch.Tensor], known: _Norms) -> dict[Parameter, torch.Tensor]:
        """The norm of each gradient, in the order of the model's parameters."""
        norms = {}
        for parameter in sorted(gradients, key=lambda p: self._order.get(p, len(self._order))):
            gradient, taken = gradients[parameter], known.get(parameter)
            if taken is not None and taken[0] is gradient:  # not so if a gradient from outside was added
                norms[parameter] = taken[1]
            else:
                norms[parameter] = self._norm_of_one(parameter, gradient)
        return norms

    def _norm_of_one(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The norm of a gradient, taken in the dtype of its parameter."""
        entries = gradient.coalesce().values() if gradient.is_sparse else gradient  # an embedding outside of the compiled model
        return norm_of(entries, parameter.dtype)

    def _skip_step(self) -> None:
        self._skipped += 1
        if self.scale is None:  # fp16: a loss scale that was too large is normal
            warnings.warn(
                f"the gradients' norm is {self._norm}, so this step updates nothing (stats().skipped_steps counts such steps)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _update(self, step: DeferredStep, gradients: Mapping[Parameter, torch.Tensor]) -> None:
        """Update the parameters of a segment. Raises `L2LError` if any code has written into one of them since."""
        if step.factor == 0.0:
            return
        with unwatched():
            step.guard.check(gradients)
            self._step_layer(gradients, step.factor, step.groups)
