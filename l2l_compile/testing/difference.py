"""Two runs of the same step, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

LOSS, OUTPUT, GRADIENT, BUFFER, PARAMETER, INPUT = "loss", "output", "gradient", "buffer", "parameter", "input"
INPUT_GRADIENT, STATE = "gradient of input", "optimizer state"


class Key(NamedTuple):
    """The key of a tensor: its kind, and its name, which is unique within the kind."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.kind in (GRADIENT, STATE) else f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True)
class Difference:
    """One tensor of a streamed step against the same tensor in eager.

    segments  names of the segments that make the tensor; empty if they are not known
    error     norm of the difference; infinite if an entry is finite in only one of the two tensors
    norm      norm of eager's tensor; in training, norm of the change by the steps
    least     an error up to this norm is the rounding of stored values (0.0 for the tensors of one step)
    problem   a difference that has no norm: a missing gradient, another shape, other whole numbers; None if there is none
    """

    key: Key
    segments: tuple[str, ...]
    error: float
    norm: float
    least: float = 0.0
    problem: str | None = None

    @property
    def relative(self) -> float:
        return self.error / self.norm if self.norm else (math.inf if self.error else 0.0)

    @property
    def place(self) -> str:
        """The segments as text: `layers.0`, `layers.0 … layers.3`."""
        first_and_last = dict.fromkeys((*self.segments[:1], *self.segments[-1:]))
        return " … ".join(first_and_last)

    def __str__(self) -> str:
        return f"{self.key}{f' (segment {self.place!r})' if self.segments else ''}"


def difference(
    key: Key, actual: Any, expected: Any, segments: tuple[str, ...] = (), norm: float | None = None, least: float = 0.0
) -> Difference:
    """Compare one tensor. If `norm` is given, it replaces the norm of eager's tensor."""
    problem = _problem(actual, expected)
    if problem is not None or not isinstance(expected, torch.Tensor) or actual.is_meta:
        return Difference(key, segments, math.inf if problem else 0.0, 0.0, least, problem)
    return Difference(key, segments, error_of(actual, expected), norm_of(expected) if norm is None else norm, least)


def _problem(actual: Any, expected: Any) -> str | None:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        if isinstance(expected, torch.Tensor):
            return "is missing"
        if isinstance(actual, torch.Tensor):
            return "is there, and eager has none"
        return None if actual == expected else f"is {actual!r}, and eager's is {expected!r}"
    for what in ("shape", "dtype", "requires_grad"):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        if ours != theirs and not (what == "requires_grad" and actual.is_meta):
            return f"has {what} {_told(ours)}, and eager's has {_told(theirs)}"
    if not (expected.is_floating_point() or expected.is_complex()) and not torch.equal(actual, expected):
        return (
            f"is {actual.item()}, and eager's is {expected.item()}"
            if actual.numel() == 1
            else "has other whole numbers than eager's"
        )
    if expected.isnan().any():
        return "cannot be compared: eager's has entries that are not a number"
    return None


def _told(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)


@torch.no_grad()
def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference; infinite if non-finite entries differ. For whole numbers, 0.0 if equal, else infinite."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    alike = actual == expected  # infinite entries as well
    if not (alike | (actual.isfinite() & expected.isfinite())).all():
        return math.inf
    return torch.where(alike, torch.zeros_like(actual), actual - expected).norm().item()


@torch.no_grad()
def norm_of(tensor: torch.Tensor) -> float:
    """The norm of the finite entries; 0.0 for whole numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))
    return finite.to(torch.complex128 if tensor.is_complex() else torch.float64).norm().item()


def differences(
    actual: Mapping[Key, Any], expected: Mapping[Key, Any], segments_of: Callable[[Key], tuple[str, ...]]
) -> list[Difference]:
    """One `Difference` for each tensor of either run."""
    return [difference(key, actual.get(key), expected.get(key), segments_of(key)) for key in dict.fromkeys((*expected, *actual))]
