"""A compiled model and its eager copy, which take the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from l2l_compile.errors import L2LError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.inspection.programs import programs
from l2l_compile.ir.program import Program
from l2l_compile.options import Options
from l2l_compile.testing.blame import Places
from l2l_compile.testing.comparison import Comparison
from l2l_compile.testing.difference import BUFFER, GRADIENT, INPUT, PARAMETER, Difference, Key, differences
from l2l_compile.testing.draws import Watched
from l2l_compile.testing.leaves import converted, inputs_of
from l2l_compile.testing.model_copies import copied, options_of, plain
from l2l_compile.testing.observation import Step, observe, random_state, restore, state_of, step_with
from l2l_compile.testing.own_error import NARROW, TOGETHER, RepeatableStep, computed_in, total
from l2l_compile.testing.reversal import Recorded
from l2l_compile.testing.tolerances import AsAutocast, Rule, promise
from l2l_compile.testing.verdicts import EagerError

_WRITTEN = (BUFFER, PARAMETER, INPUT)


class Pair:
    """Takes training steps of a model streamed and in eager, and compares them.

    streamed, eager   modules with equal parameters and buffers, which the steps change; or twice the same function
    compiled          `streamed` as `torch.compile(..., backend="l2l")` returned it; `streamed` itself if only its parts are
    tolerance, loss   as in `compare`
    """

    def __init__(
        self,
        streamed: Callable,
        eager: Callable,
        compiled: Callable,
        *,
        tolerance: float | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ):
        self.streamed, self.eager, self.compiled = streamed, eager, compiled
        self.options = Options.build(options_of(compiled))
        self.tolerance, self._step = tolerance, step_with(loss)
        self._dtype: torch.dtype | None = None  # inputs are converted to it
        self._count = 0

    @classmethod
    def of(
        cls,
        model: Callable,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = torch.float64,
        tolerance: float | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> Pair:
        """A pair of two deep copies of a model, converted to `dtype`; the model stays as it is. See `compare`."""
        chosen = options_of(model) if options is None else dict(options)
        built = Options.build(chosen)
        if built.optimizer is not None:
            raise L2LError(
                "an optimizer in the options holds the parameters of the model, and copies of the model are compared. "
                "training_equivalent(model, batches, optimizer) makes an optimizer for each copy"
            )
        if built.precision != "fp32" and dtype is torch.float64:
            dtype = torch.float32  # float64 has no 16-bit copy
        streamed, eager = copied(plain(model), dtype), copied(plain(model), dtype)
        if built.precision == "fp16" and isinstance(streamed, nn.Module):  # holds the scale of the loss
            chosen["optimizer"] = torch.optim.SGD(streamed.parameters(), lr=0.0)
        pair = cls(streamed, eager, torch.compile(streamed, backend="l2l", options=chosen), tolerance=tolerance, loss=loss)
        pair._dtype = dtype
        return pair

    @property
    def programs(self) -> tuple[Program, ...]:
        """The streamed programs so far; empty for a model of which only parts are compiled."""
        return programs(self.compiled) if adapter.owner_of(self.compiled) is not None else ()

    def step(self, *args: Any, **kwargs: Any) -> Comparison:
        """One training step on a batch: a forward, and a backward of its loss."""
        return self.run(self._step, *args, **kwargs)

    def run(self, step: Step, *args: Any, **kwargs: Any) -> Comparison:
        """Run the caller's own step: `step(call, *args, **kwargs)` calls `call` in the place of the model and runs backward.

        The return values of `step` are compared. It runs twice or more, with the same random numbers each time.
        """
        self._count += 1
        args, kwargs = converted((args, kwargs), self._dtype)
        before, random, recorded = state_of(self.eager), torch.get_rng_state(), Recorded(Watched(self.eager))
        expected = observe(self.eager, recorded, step, args, kwargs)
        with random_state(random):
            actual = self._streamed(step, args, kwargs, before)
        repeat = RepeatableStep(self.eager, step, args, kwargs, before, random, expected, recorded.results)
        found = differences(actual, expected, Places(self.programs))
        inputs = {Key(INPUT, name): value for name, value in inputs_of(args, kwargs).items()}
        return self._compared([d for d in found if _says_something(d, expected, {**before, **inputs})], repeat)

    def _streamed(self, step: Step, args: tuple, kwargs: Mapping[str, Any], before: Mapping[Key, torch.Tensor]) -> dict[Key, Any]:
        """Run the streamed step; in fp16, repeat it with a smaller loss scale while a gradient overflows."""
        optimizer = self.options.optimizer if self.options.precision == "fp16" else None
        found = observe(self.streamed, self.compiled, step, args, kwargs)
        while optimizer is not None and not all(map(_is_finite, (v for k, v in found.items() if k.kind == GRADIENT))):
            optimizer.step()
            restore(self.streamed, before)
            found = observe(self.streamed, self.compiled, step, args, kwargs)
        return found

    def _compared(self, found: Sequence[Difference], repeat: RepeatableStep) -> Comparison:
        dtype, number = _dtype_of(repeat), self._count
        title = f"streamed against eager in {str(dtype).removeprefix('torch.')}"

        def measured(how: Callable[[RepeatableStep], EagerError]) -> Callable[[], EagerError]:
            return lambda: how(repeat) if number == self._count else EagerError(why="not measured before the next step")

        if self.options.precision != "fp32":
            narrow = NARROW[self.options.precision]
            title += f", with precision={self.options.precision!r}"
            together = _together(found)
            judged = (*(d for d in found if d.key.kind != GRADIENT or d.problem is not None), together)
            shown = tuple(d for d in found if d not in judged)
            rule: Rule = AsAutocast(torch.finfo(narrow).eps if self.tolerance is None else self.tolerance)
            return Comparison(title, judged, rule, self.programs, measured(lambda r: r.autocast(narrow)), shown)
        narrowest = computed_in(self.programs, None, dtype)
        if narrowest is not dtype:
            title += f", parts of it in {str(narrowest).removeprefix('torch.')}"
        rule = promise(dtype, narrowest, self.tolerance, self.options.block_compiler)
        return Comparison(title, tuple(found), rule, self.programs, measured(lambda r: r.reversed(narrowest)))


def _says_something(difference: Difference, expected: Mapping[Key, Any], before: Mapping[Key, torch.Tensor]) -> bool:
    """Whether to compare a tensor: a parameter, buffer or input if the step wrote to it, any other tensor if eager has it."""
    if difference.key.kind not in _WRITTEN:
        return expected.get(difference.key) is not None or difference.problem is not None
    return difference.problem is not None or difference.error > 0 or not _same(expected[difference.key], before[difference.key])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def _together(found: Sequence[Difference]) -> Difference:
    gradients = [d for d in found if d.key.kind == GRADIENT and d.problem is None]
    return Difference(TOGETHER, (), total(d.error for d in gradients), total(d.norm for d in gradients))


def _dtype_of(repeat: RepeatableStep) -> torch.dtype:
    """The narrowest floating-point dtype of the parameters, or of the inputs if there are no parameters."""
    parameters: list[torch.Tensor] = list(repeat.module.parameters()) if isinstance(repeat.module, nn.Module) else []
    tensors = parameters or [t for t in inputs_of(repeat.args, repeat.kwargs).values() if isinstance(t, torch.Tensor)]
    return min((t.dtype for t in tensors if t.is_floating_point()), key=lambda d: d.itemsize, default=torch.float64)
