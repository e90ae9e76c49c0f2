"""How far a streamed tensor may be from eager's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ..errors import L2LError

PROMISED = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative to the norm of each tensor
REORDERINGS = 10  # errors up to so many times that of eager with its rows reversed are rounding
ROUNDINGS = 32  # errors up to so many units in the last place of the largest tensor of a kind are rounding
SMALL = 1e-4  # a fixed tolerance takes a tensor to be at least that part of the largest one, if eager's own error is as large
NO_DIGITS = 1e-2  # roundings in eager itself change the tensor by more: hardly a digit of it is known


@dataclass(frozen=True)
class Expected:
    """A tensor of eager's, as norms.

    norm   of the tensor; in training, of what the steps have added to it
    scale  of the largest tensor of its kind
    own    the error of eager itself; None where it is not known
    noise  how far the tensor moves when the parameters move by one unit in the last place; None where it is not known
    """

    norm: float
    scale: float
    own: float | None = None
    noise: float | None = None


class Rule(Protocol):
    """`beside` says which error `own` is, as the title of a column."""

    beside: ClassVar[str]

    def allowed(self, expected: Expected) -> float:
        """The largest error, as a norm."""
        ...

    def is_zero(self, expected: Expected) -> bool:
        """Whether eager's tensor is zero but for rounding: an error relative to it means nothing."""
        ...


@dataclass(frozen=True)
class Promise:
    """The promise of the backend for a dtype, or a tolerance of the caller's.

    tolerance   relative to the norm of a tensor
    eps         of the dtype
    fixed       whether an error above `tolerance` is an error although eager's own is as large. It is not fixed in the promise for a
                dtype, except in float64 for a model that computes in a narrower dtype somewhere: such parts are summed in
                eager's order.
    """

    tolerance: float
    eps: float
    fixed: bool

    beside: ClassVar[str] = "eager, rows reversed"

    def allowed(self, expected: Expected) -> float:
        promised, rounding = self.tolerance * expected.norm, ROUNDINGS * self.eps * expected.scale
        small = self.tolerance * SMALL * expected.scale
        reordering = REORDERINGS * (expected.own or 0.0)
        if self.is_zero(expected):
            return max(promised, rounding, 0.0 if self.fixed else reordering)
        if expected.own is None:
            return max(promised, min(rounding, small))
        return max(promised, min(reordering, small) if self.fixed else reordering)

    def is_zero(self, expected: Expected) -> bool:
        """Such a tensor is a sum whose terms cancel: its rounding is that of the terms.

        Rows in another order may hit on the same rounding (each row is rounded by itself, or all rows are equal). Parameters that
        move by a rounding give another one. A tensor that is small, and not a sum that cancels, moves by as little as it is small.
        """
        measured = [error for error in (expected.own, expected.noise) if error is not None]
        if not measured:
            return expected.norm <= ROUNDINGS * self.eps * expected.scale
        return max(measured) >= NO_DIGITS * expected.norm


@dataclass(frozen=True)
class AsAutocast:
    """In 16 bits: no worse than 1.5 times the error of autocast. A relative error up to `least` passes: a rounding to the 16 bits."""

    least: float

    beside: ClassVar[str] = "autocast"

    def allowed(self, expected: Expected) -> float:
        return max(1.5 * (expected.own or 0.0), self.least * expected.norm)

    def is_zero(self, expected: Expected) -> bool:
        return expected.own is not None and expected.own >= expected.norm


@dataclass(frozen=True)
class SameUpdates:
    """Trainings with the same gradients: a relative tolerance, 0.0 for the same bits.

    Where eager's own error is `noise` of a tensor or more, the steps have followed rounding: ten times that error passes.
    """

    tolerance: float
    noise: float

    beside: ClassVar[str] = "at_step, rows reversed"

    def allowed(self, expected: Expected) -> float:
        return REORDERINGS * (expected.own or 0.0) if self.is_zero(expected) else self.tolerance * expected.norm

    def is_zero(self, expected: Expected) -> bool:
        return self.tolerance > 0 and expected.own is not None and expected.own >= self.noise * expected.norm


def promise(dtype: torch.dtype, computed_in: torch.dtype, tolerance: float | None, block_compiler: str = "eager") -> Promise:
    """The rule for a model in a dtype, parts of which may compute in a narrower one.

    Uncompiled blocks compute such parts operation by operation, as eager does. Inductor rounds them otherwise: what holds for compiled
    blocks is the promise for the narrower dtype.

    Raises `L2LError` for a dtype without a promise if there is no tolerance either.
    """
    if tolerance is None and dtype not in PROMISED:
        name = str(dtype).removeprefix("torch.")
        raise L2LError(
            f"there is no promise for a model in {name}: compare it in another dtype (dtype=torch.float32), or give a tolerance"
        )
    in_parts = dtype is torch.float64 and computed_in is not dtype
    if tolerance is None and in_parts and block_compiler != "eager":
        return Promise(PROMISED.get(computed_in, torch.finfo(computed_in).eps), torch.finfo(computed_in).eps, fixed=False)
    return Promise(PROMISED[dtype] if tolerance is None else tolerance, torch.finfo(dtype).eps, tolerance is not None or in_parts)
