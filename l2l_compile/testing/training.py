"""Does streamed training equal training in eager? Several steps, with each value of the option `update`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from l2l_compile.errors import L2LError
from l2l_compile.host.compiled_step.compiled_step import why_not_compiled
from l2l_compile.inspection.programs import programs
from l2l_compile.options import Options
from l2l_compile.testing.blame import Places
from l2l_compile.testing.comparison import Comparison
from l2l_compile.testing.difference import LOSS, PARAMETER, STATE, Key, difference, error_of, norm_of
from l2l_compile.testing.draws import Watched
from l2l_compile.testing.leaves import converted
from l2l_compile.testing.loop import CallWith, Loop, MakeOptimizer, MakeScheduler, Run
from l2l_compile.testing.model_copies import copied, options_of, plain
from l2l_compile.testing.observation import Call, State, random_state, state_of
from l2l_compile.testing.own_error import computed_in
from l2l_compile.testing.reversal import Recorded, Reversed
from l2l_compile.testing.step_loss import loss_of
from l2l_compile.testing.tolerances import NO_DIGITS, Rule, SameUpdates, promise
from l2l_compile.testing.verdicts import DEPENDS, EagerError
from l2l_compile.update_modes import MODES

COMPILED_UPDATE = 1e-6  # relative error of an update compiled into one pass over memory; other updates have the same bits


@dataclass(frozen=True)
class TrainingComparison:
    """Trainings side by side, one `Comparison` for each pair. `print` shows them all."""

    comparisons: tuple[Comparison, ...]

    @property
    def passes(self) -> bool:
        return all(comparison.passes for comparison in self.comparisons)

    def check(self) -> TrainingComparison:
        """Return self. Raises `AssertionError` for the first pair that differs."""
        for comparison in self.comparisons:
            comparison.check()
        return self

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.comparisons))


def training_equivalent(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: MakeOptimizer,
    *,
    updates: Sequence[str] = tuple(MODES),
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    scheduler: MakeScheduler | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
) -> TrainingComparison:
    """Train deep copies of a model in eager, and streamed with each value of `update`. Returns the comparisons if they agree.

    Streamed training with update="at_step" must equal training in eager: the loss of each batch, and after the last step all
    parameters, buffers and the optimizer state. Errors of parameters are relative to the change that the steps made. As in
    `assert_equivalent`, an error may be ten times the error of eager with the rows of every batch reversed. Other values of
    `update` must give the same bits as "at_step". If the update is compiled into one pass over memory, a relative error up to
    1e-6 passes, and up to ten times the error of "at_step" with the rows reversed. With precision="bf16" or "fp16", streamed
    training is not compared with eager.

    batches        batches, each a tensor, a tuple of arguments or a dict of keyword arguments
    optimizer      makes an optimizer from parameters: `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`
    updates        values of the option `update`; "at_step" always runs
    scheduler      makes a scheduler of the learning rate from an optimizer; it steps with the optimizer
    accumulate     batches in a step
    max_grad_norm  clips the norm of all gradients (not with "in_backward")

    The other arguments are as in `assert_equivalent`. Raises `AssertionError` with the tensors that differ.
    """
    chosen = options_of(model) if options is None else dict(options)
    built = Options.build(chosen)
    if built.optimizer is not None:
        raise L2LError("the option 'optimizer' is set for each way to update: leave it out, and give the argument `optimizer`")
    if built.precision != "fp32" and dtype is torch.float64:
        dtype = torch.float32  # float64 has no 16-bit copy
    module = plain(model)
    if not isinstance(module, nn.Module):
        raise L2LError(
            f"training needs a module, which has parameters, got {module!r}: compare a function with `assert_equivalent`"
        )
    calls = [_arguments(batch, dtype) for batch in batches]
    if not calls or len(calls) % accumulate:
        raise L2LError(f"{len(calls)} batches are no whole number of steps of {accumulate}")
    loop = Loop(calls, optimizer, scheduler, loss_of if loss is None else loss, accumulate, max_grad_norm)
    trainings = _Trainings(module, dtype, chosen, loop, torch.get_rng_state())

    ways = [update for update in updates if update != "at_step"]
    if built.precision != "fp32" and not ways:
        raise L2LError(
            f"nothing to compare: with precision={built.precision!r}, 'at_step' is what other ways to update are compared with"
        )
    found: list[Comparison] = []
    if built.precision == "fp32":
        eager = trainings.run(_eagerly)
        at_step = trainings.streamed("at_step")
        found.append(trainings.against_eager(at_step, eager, tolerance))
    else:
        at_step = trainings.streamed("at_step")
    found += [trainings.against_at_step(update, at_step) for update in ways]
    return TrainingComparison(tuple(found)).check()


def _eagerly(module: nn.Module, _: torch.optim.Optimizer) -> Call:
    return Watched(module)


def _arguments(batch: Any, dtype: torch.dtype | None) -> tuple[tuple, dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), converted(dict(batch), dtype)
    return converted(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), dtype), {}


@dataclass(frozen=True)
class _Trainings:
    """Trainings of copies of one model, each with the same batches and random numbers."""

    model: nn.Module
    dtype: torch.dtype | None
    options: Mapping[str, Any]
    loop: Loop
    random: torch.Tensor

    def run(self, call_with: CallWith, update: str = "at_step", wrap: Callable[[Call], Any] = Recorded) -> Run:
        with random_state(self.random):
            return self.loop.run(copied(self.model, self.dtype), call_with, update, wrap)

    def compiled(self, update: str) -> CallWith:
        def call_with(module: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
            chosen = dict(self.options)
            if update != "at_step" or chosen.get("precision") == "fp16":
                chosen |= {"optimizer": optimizer, "update": update}
            if update != "at_step":
                chosen |= {"accumulate": self.loop.accumulate, "max_grad_norm": self.loop.max_grad_norm}
            return torch.compile(module, backend="l2l", options=chosen)

        return call_with

    def streamed(self, update: str) -> Run:
        return self.run(self.compiled(update), update)

    def against_eager(self, streamed: Run, eager: Run, tolerance: float | None) -> Comparison:
        dtype = _narrowest(self.before)
        compiler = self.options.get("block_compiler", Options.block_compiler)
        rule = replace(promise(dtype, self._computed_in(streamed), tolerance, compiler), fixed=False)
        title = f"update at_step against eager in {str(dtype).removeprefix('torch.')}"
        rounding = torch.finfo(dtype).eps * len(self.loop.batches)
        return self._compared(title, streamed, eager, rule, rounding, _eagerly)

    def against_at_step(self, update: str, at_step: Run) -> Comparison:
        fresh = self.loop.optimizer(copied(self.model, self.dtype).parameters())
        is_compiled = self.options.get("compile_update", True) and not why_not_compiled(fresh)
        tolerance = COMPILED_UPDATE if is_compiled else 0.0
        rule = SameUpdates(tolerance, max(NO_DIGITS, torch.finfo(self._computed_in(at_step)).eps ** 0.5))
        title = f"update {update} against at_step"
        return self._compared(title, self.streamed(update), at_step, rule, tolerance, self.compiled("at_step"))

    def _compared(self, title: str, streamed: Run, expected: Run, rule: Rule, rounding: float, call_with: CallWith) -> Comparison:
        """Compare two runs. A parameter's error is relative to its change by the steps; `rounding` times its norm passes."""
        places = Places(programs(streamed.call))
        found = []
        for key in dict.fromkeys((*expected.values, *streamed.values)):
            actual, theirs, segments = streamed.values.get(key), expected.values.get(key), places(_owner(key))
            norm, least = None, 0.0
            if key.kind == PARAMETER and isinstance(theirs, torch.Tensor):
                norm, least = error_of(theirs, self.before[key]), rounding * norm_of(theirs)
            found.append(difference(key, actual, theirs, segments, norm, least))

        def own() -> EagerError:
            return self._reversed(expected, call_with, self._computed_in(streamed))

        return Comparison(title, tuple(found), rule, programs(streamed.call), own)

    def _computed_in(self, streamed: Run) -> torch.dtype:
        return computed_in(programs(streamed.call), self.options.get("precision"), _narrowest(self.before))

    @functools.cached_property
    def before(self) -> State:
        """Parameters and buffers before training."""
        return state_of(copied(self.model, self.dtype))

    def _reversed(self, run: Run, call_with: CallWith, narrowest: torch.dtype) -> EagerError:
        """Errors of a run with the rows of every batch reversed; none if that changes half the digits of the first loss."""
        first = Key(LOSS, "of batch 0")
        limit = torch.finfo(narrowest).eps ** 0.5 * norm_of(run.values[first])
        for dim in (0, 1):
            try:
                found = self.run(call_with, wrap=functools.partial(Reversed, results=run.results, dim=dim)).values
            except Exception:  # noqa: BLE001 - a model may fail with anything if the reversed dimension has no rows
                continue
            pairs = {key: (found.get(key), value) for key, value in run.values.items() if isinstance(value, torch.Tensor)}
            errors = {key: error_of(a, e) for key, (a, e) in pairs.items() if isinstance(a, torch.Tensor)}
            if errors[first] <= limit:
                return EagerError(errors | _losses(errors, run.values))
        return EagerError(why=DEPENDS)


def _losses(errors: Mapping[Key, float], values: Mapping[Key, Any]) -> dict[Key, float]:
    """Errors of the losses, each at least as large, relative to its loss, as those of the batches before: some round alike by chance."""
    losses = {key: norm_of(values[key]) for key in errors if key.kind == LOSS}  # in the order of the batches
    largest = itertools.accumulate((errors[key] / norm if norm else 0.0 for key, norm in losses.items()), max)
    return {key: share * norm for (key, norm), share in zip(losses.items(), largest, strict=True)}


def _narrowest(state: Mapping[Key, torch.Tensor]) -> torch.dtype:
    """The narrowest floating-point dtype of the parameters."""
    found = [t.dtype for key, t in state.items() if key.kind == PARAMETER and t.is_floating_point()]
    return min(found, key=lambda dtype: dtype.itemsize)


def _owner(key: Key) -> Key:
    """The key of the parameter that a state of the optimizer belongs to; any other key itself."""
    return Key(key.kind, key.name.partition(": ")[0]) if key.kind == STATE else key
