"""The differences of two runs, judged by a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from l2l_compile.ir.program import Program
from l2l_compile.testing.difference import GRADIENT, Difference, Key
from l2l_compile.testing.tolerances import Expected, Rule

DEPENDS = "not known, since the numbers depend on the order of the rows"


@dataclass(frozen=True)
class EagerError:
    """The error of eager itself, as norms.

    errors  on the same batch with its rows reversed, or under autocast
    noise   with the parameters moved by one unit in the last place
    why     the reason why there are no `errors`; None if there are
    """

    errors: Mapping[Key, float] = field(default_factory=dict)
    noise: Mapping[Key, float] = field(default_factory=dict)
    why: str | None = None


@dataclass(frozen=True)
class Verdict:
    """One difference, judged.

    own      the error of eager itself, as a norm; None where it is not known
    allowed  the largest error that passes, as a norm
    is_zero  whether eager's tensor is zero up to rounding
    """

    difference: Difference
    own: float | None
    allowed: float
    is_zero: bool

    @property
    def passes(self) -> bool:
        return self.difference.problem is None and self.difference.error <= self.allowed


@dataclass(frozen=True)
class Verdicts:
    """A streamed run beside the same run in eager: the differences, and whether each passes.

    title        names the two runs
    differences  one for each tensor
    rule         how large an error may be
    programs     the streamed programs
    measure      measures the error of eager itself
    shown        differences that are printed and not judged
    """

    title: str
    differences: tuple[Difference, ...]
    rule: Rule
    programs: tuple[Program, ...] = field(repr=False)
    measure: Callable[[], EagerError] = field(repr=False)
    shown: tuple[Difference, ...] = ()

    @functools.cached_property
    def own(self) -> EagerError:
        """The error of eager itself, measured at the first access. That must come before the next step of the same pair."""
        return self.measure()

    @functools.cached_property
    def failures(self) -> tuple[Verdict, ...]:
        """The differences that are errors, worst first. Measures the error of eager itself only if a difference is in doubt."""
        doubtful = [d for d in self.differences if not self._judged(d, Expected(d.norm, 0.0)).passes]
        found = [verdict for d in doubtful if not (verdict := self.verdict(d)).passes]
        return tuple(sorted(found, key=_excess, reverse=True))

    @property
    def passes(self) -> bool:
        return not self.failures

    @property
    def worst(self) -> Verdict:
        """The gradient with the largest relative error. Without gradients, the tensor with the largest relative error."""
        order = self.ordered()
        return next((v for v in order if v.difference.key.kind == GRADIENT), order[0])

    def verdict(self, difference: Difference) -> Verdict:
        """Judge one difference. Measures the error of eager itself if it is not known yet."""
        kind = difference.key.kind
        scale = max(d.norm for d in (*self.differences, *self.shown) if d.key.kind == kind)
        own, noise = self.own.errors.get(difference.key), self.own.noise.get(difference.key)
        return self._judged(difference, Expected(difference.norm, scale, own, noise))

    def _judged(self, difference: Difference, expected: Expected) -> Verdict:
        allowed = max(difference.least, self.rule.allowed(expected))
        return Verdict(difference, expected.own, allowed, self.rule.is_zero(expected))

    def ordered(self) -> list[Verdict]:
        """Judged differences, failures first, then `shown` ones. Larger errors are first, zeros up to rounding last."""
        judged = sorted(map(self.verdict, self.differences), key=lambda v: (v.passes, v.is_zero, -v.difference.relative))
        return judged + sorted(map(self.verdict, self.shown), key=lambda v: (v.is_zero, -v.difference.relative))


def _excess(verdict: Verdict) -> float:
    if verdict.difference.problem is not None:
        return float("inf")
    return verdict.difference.error / verdict.allowed if verdict.allowed else verdict.difference.error
