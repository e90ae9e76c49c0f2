"""The error of eager itself, measured on the step that was compared.

It is the error of the same step in eager with the rows reversed, or under autocast. A third step, with the parameters moved by
one unit in the last place, measures whether a tensor has any correct digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.ir.program import Program
from l2l_compile.testing.difference import GRADIENT, INPUT_GRADIENT, LOSS, OUTPUT, Key, error_of, norm_of
from l2l_compile.testing.moves import Move
from l2l_compile.testing.observation import Call, State, Step, observe, put_back, random_state, restore
from l2l_compile.testing.reversal import Reversed
from l2l_compile.testing.verdicts import DEPENDS, EagerError

TOGETHER = Key(GRADIENT, "all parameters together")
MOVES = 3  # one move alone may by chance give nearly the same rounding


@dataclass(frozen=True)
class RepeatableStep:
    """A step that eager can repeat: its model, the state before it, and all its arguments.

    expected   results, gradients and state after the step
    results    the outputs of each call of the model
    """

    module: Any
    step: Step
    args: tuple
    kwargs: Mapping[str, Any]
    before: State
    random: torch.Tensor
    expected: Mapping[Key, Any]
    results: Sequence[Any]

    def reversed(self, narrowest: torch.dtype) -> EagerError:
        """The error with the rows in reverse order; no `errors` if half of the digits (of the narrowest dtype) depend on it."""
        limit = torch.finfo(narrowest).eps ** 0.5
        noise = self._noise(limit)
        for dim in (0, 1):
            try:
                errors = self._errors(Reversed(self.module, self.results, dim))
            except Exception:  # noqa: BLE001 - a model may fail with anything if the reversed dimension has no rows
                continue
            if self._is_rounding(errors, limit):
                return EagerError(self._small(errors, limit), noise)
        return EagerError(noise=noise, why=DEPENDS)

    def _noise(self, limit: float) -> dict[Key, float]:
        """The largest errors of `MOVES` steps with parameters and batch moved by one unit in the last place.

        If moving the batch changes more than half of the digits, only the parameters move. If that does too, empty.
        """
        for batch in (True, False):
            found = [self._moved(Move(seed, batch)) for seed in range(MOVES)]
            if all(self._is_rounding(errors, limit) for errors in found):
                largest = {key: max(errors.get(key, math.inf) for errors in found) for key in found[0]}
                return self._small(largest, limit)
        return {}

    def _moved(self, move: Move) -> dict[Key, float]:
        return self._errors(self.module, move.state(self.before, self.expected), move.inputs((self.args, dict(self.kwargs))))

    def autocast(self, dtype: torch.dtype) -> EagerError:
        """The error of the model under autocast to `dtype`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return self.module(*args, **kwargs)

        errors = self._errors(call)
        return EagerError({**errors, TOGETHER: total(e for key, e in errors.items() if key.kind == GRADIENT)})

    def _errors(
        self, call: Call, state: State | None = None, inputs: tuple[tuple, Mapping[str, Any]] | None = None
    ) -> dict[Key, float]:
        """Norms of the differences between the repeated step and `expected`. Restores the model to its state after the step."""
        restore(self.module, self.before if state is None else state)
        args, kwargs = (self.args, self.kwargs) if inputs is None else inputs
        try:
            with random_state(self.random):
                found = observe(self.module, call, self.step, args, kwargs)
        finally:
            put_back(self.module, self.expected)
        pairs = {key: (found.get(key), value) for key, value in self.expected.items() if isinstance(value, torch.Tensor)}
        return {key: error_of(a, e) for key, (a, e) in pairs.items() if isinstance(a, torch.Tensor) and a.shape == e.shape}

    def _is_rounding(self, errors: Mapping[Key, float], limit: float) -> bool:
        return all(self._share(errors, kinds) <= limit for kinds in ((LOSS, OUTPUT), (GRADIENT, INPUT_GRADIENT)))

    def _small(self, errors: Mapping[Key, float], limit: float) -> dict[Key, float]:
        """Drop errors of single tensors that depend on more than rounding, such as a buffer that keeps rows of the batch."""
        norms = {key: norm_of(self.expected[key]) for key in errors}
        scales = {kind: max(norm for key, norm in norms.items() if key.kind == kind) for kind in {key.kind for key in errors}}
        return {key: error for key, error in errors.items() if error <= limit * scales[key.kind]}

    def _share(self, errors: Mapping[Key, float], kinds: tuple[str, ...]) -> float:
        """The error of all tensors of some kinds together, relative to their norm."""
        keys = [key for key in errors if key.kind in kinds]
        norm = total(norm_of(self.expected[key]) for key in keys)
        error = total(errors[key] for key in keys)
        return error / norm if norm else error


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computed_in(programs: Sequence[Program], precision: str | None, dtype: torch.dtype) -> torch.dtype:
    """The narrowest floating-point dtype in which a model of a dtype computes."""
    found = {spec.dtype for program in programs for spec in program.captured.specs.values()}
    narrow = NARROW.get(precision or "", dtype)
    return min((dtype, narrow, *(d for d in found if d.is_floating_point)), key=lambda d: d.itemsize)


def total(norms: Iterable[float]) -> float:
    """The norm of several tensors together."""
    return sum(norm**2 for norm in norms) ** 0.5
