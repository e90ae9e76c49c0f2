"""The settings of the stage parity, in an order in which every pair of values comes early."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
FACTORS = {
    "precision": PRECISIONS,
    "stash": ("host", "device"),
    "update": ("at_step", "in_backward", "in_forward"),
    "prefetch": (1, 0, 2),
}


@dataclass(frozen=True)
class Setting:
    """Options of one comparison. fp64 is a model in float64, computed in the dtype of its parameters."""

    model: str
    precision: str
    stash: str
    update: str
    prefetch: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def narrow(self) -> torch.dtype | None:
        """The 16-bit dtype of the computation; None for fp32 and fp64."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def options(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        needs_optimizer = self.update != "at_step" or self.precision == "fp16"
        return {
            "micro_batches": 3, "precision": "fp32" if self.narrow is None else self.precision, "stash": self.stash,
            "update": self.update, "prefetch": self.prefetch, **({"optimizer": optimizer} if needs_optimizer else {}),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.model} {self.precision} stash={self.stash} {self.update} prefetch={self.prefetch}"


def is_allowed(values: Mapping[str, Any]) -> bool:
    """Whether options go together: fp16 skips a step when a gradient overflows, which `in_backward` cannot do."""
    return not (values["precision"] == "fp16" and values["update"] == "in_backward")


def settings(models: Sequence[str]) -> list[Setting]:
    """Every allowed combination once: first a few that cover all pairs of values, then the rest in random order."""
    factors = {"model": tuple(models), **FACTORS}
    combinations = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    allowed = [c for c in combinations if is_allowed(c)]
    first = covering(allowed)
    others = [c for c in allowed if c not in first]
    random.Random(0).shuffle(others)
    return [Setting(**c) for c in (*first, *others)]


def covering(combinations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A greedy choice of combinations that covers all pairs of values of two factors: each adds the most new pairs."""
    pairs = [pairs_of(c) for c in combinations]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(combinations)), key=lambda i: len(pairs[i] & missing))
        chosen.append(combinations[best])
        missing -= pairs[best]
    return chosen


def pairs_of(combination: Mapping[str, Any]) -> frozenset[tuple]:
    """The pairs of values of two factors in a combination."""
    return frozenset(itertools.combinations(combination.items(), 2))
