"""The error of eager itself, measured on the step that was compared: with the rows reversed, or under autocast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import Program
from .difference import GRADIENT, INPUT_GRADIENT, LOSS, OUTPUT, Key, error_of, norm_of
from .observation import Call, State, Step, observe, random_state, restore
from .reversal import Reversed
from .verdicts import Own

TOGETHER = Key(GRADIENT, "all parameters together")
UNKNOWN = "not known, since the numbers depend on the order of the rows"


@dataclass(frozen=True)
class Repeat:
    """A step that eager can take again: its model, the state before it, and all that it was given.

    expected   all that the step left behind
    results    what the calls of the model returned
    """

    module: Any
    step: Step
    args: tuple
    kwargs: Mapping[str, Any]
    before: State
    random: torch.Tensor
    expected: Mapping[Key, Any]
    results: Sequence[Any]

    def reversed(self, narrowest: torch.dtype) -> Own:
        """With the rows in reverse order. There is no such error where half of the digits (of the narrowest dtype) depend on it."""
        limit = torch.finfo(narrowest).eps ** 0.5
        for dim in (0, 1):
            try:
                errors = self._errors(Reversed(self.module, self.results, dim))
            except Exception:  # noqa: BLE001 - a model may fail with anything where what was reversed are no rows
                continue
            if all(self._share(errors, kinds) <= limit for kinds in ((LOSS, OUTPUT), (GRADIENT, INPUT_GRADIENT))):
                return Own(errors)
        return Own(why=UNKNOWN)

    def autocast(self, dtype: torch.dtype) -> Own:
        """With the model called under autocast."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return self.module(*args, **kwargs)

        errors = self._errors(call)
        return Own({**errors, TOGETHER: total(e for key, e in errors.items() if key.kind == GRADIENT)})

    def _errors(self, call: Call) -> dict[Key, float]:
        restore(self.module, self.before)
        with random_state(self.random):
            found = observe(self.module, call, self.step, self.args, self.kwargs)
        pairs = {key: (found.get(key), value) for key, value in self.expected.items() if isinstance(value, torch.Tensor)}
        return {key: error_of(a, e) for key, (a, e) in pairs.items() if isinstance(a, torch.Tensor) and a.shape == e.shape}

    def _share(self, errors: Mapping[Key, float], kinds: tuple[str, ...]) -> float:
        """The error of all tensors of some kinds, relative to them."""
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
