"""How far a streamed tensor may be from eager's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from l2l_compile.errors import L2LError

PROMISED = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative to the norm of each tensor
REORDERINGS = 10  # an error up to this many times the error of eager with its rows reversed counts as rounding
ROUNDINGS = 32  # an error up to this many units in the last place of the largest tensor of a kind counts as rounding
SMALL = 1e-4  # with a fixed tolerance, if eager's own error is large, a norm counts as at least this share of the largest norm
NO_DIGITS = 1e-2  # if rounding changes eager's tensor by this share of its norm or more, hardly a digit of it is known


@dataclass(frozen=True)
class Expected:
    """A tensor of eager's, as norms.

    norm   norm of the tensor; in training, norm of the change by the steps
    scale  norm of the largest tensor of its kind
    own    the error of eager itself; None where it is not known
    noise  how far the tensor moves when the parameters move by one unit in the last place; None where it is not known
    """

    norm: float
    scale: float
    own: float | None = None
    noise: float | None = None


class Rule(Protocol):
    """`beside` is the column title for the error `own`: it says how that error was measured."""

    beside: ClassVar[str]

    def allowed(self, expected: Expected) -> float:
        """The largest error, as a norm."""
        ...

    def is_zero(self, expected: Expected) -> bool:
        """Whether eager's tensor is zero up to rounding, so that an error relative to it means nothing."""
        ...


@dataclass(frozen=True)
class Promise:
    """The promise of the backend for a dtype, or the caller's tolerance.

    tolerance   relative to the norm of a tensor
    eps         machine epsilon of the dtype
    fixed       whether an error above `tolerance` fails even if eager's own error is as large. True for the caller's tolerance,
                and for a float64 model that computes in a narrower dtype somewhere, since such parts are summed in eager's
                order. Otherwise, the promise for a dtype is not fixed.
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
        """Such a tensor is a sum whose terms cancel: its error is as large as the rounding of the terms.

        Rows in another order may by chance give the same rounding (if each row is rounded by itself, or all rows are equal).
        Parameters that move by one unit in the last place give a different rounding. A small tensor whose terms do not cancel
        moves only in proportion to its size.
        """
        measured = [error for error in (expected.own, expected.noise) if error is not None]
        if not measured:
            return expected.norm <= ROUNDINGS * self.eps * expected.scale
        return max(measured) >= NO_DIGITS * expected.norm


@dataclass(frozen=True)
class AsAutocast:
    """The rule for 16 bits: at most 1.5 times autocast's error. A relative error up to `least`, one rounding, passes too."""

    least: float

    beside: ClassVar[str] = "autocast"

    def allowed(self, expected: Expected) -> float:
        return max(1.5 * (expected.own or 0.0), self.least * expected.norm)

    def is_zero(self, expected: Expected) -> bool:
        return expected.own is not None and expected.own >= expected.norm


@dataclass(frozen=True)
class SameUpdates:
    """The rule for trainings with the same gradients: a relative tolerance, 0.0 for the same bits.

    With a tolerance, ten times the own error passes too: updates that round differently move a tensor as reversed rows do.
    If the own error is at least the share `noise` of a tensor, rounding has decided the steps.
    """

    tolerance: float
    noise: float

    beside: ClassVar[str] = "at_step, rows reversed"

    def allowed(self, expected: Expected) -> float:
        reordering = REORDERINGS * (expected.own or 0.0) if self.tolerance else 0.0
        return reordering if self.is_zero(expected) else max(self.tolerance * expected.norm, reordering)

    def is_zero(self, expected: Expected) -> bool:
        return self.tolerance > 0 and expected.own is not None and expected.own >= self.noise * expected.norm


def promise(dtype: torch.dtype, computed_in: torch.dtype, tolerance: float | None, block_compiler: str = "eager") -> Promise:
    """The rule for a model in a dtype, parts of which may compute in a narrower one.

    Uncompiled blocks compute such parts operation by operation, as eager does. Inductor rounds them differently, so compiled
    blocks get the promise for the narrower dtype.

    Raises `L2LError` for a dtype without a promise if no tolerance is given either.
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
