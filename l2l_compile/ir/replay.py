"""Results that the host makes from what it has: an attention cache with new entries, from the cache and the entries alone.

Without gradients, `cat([cache, new])` and `cache.index_copy_(dim, index, new)` move data and compute nothing. The device makes
them for its own use. Only `new` crosses the link, and the host repeats the operation on its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from l2l_compile.ir.values import Bindings, Dim, evaluate


@dataclass(frozen=True)
class Given:
    """The argument of the call with this index."""

    index: int


@dataclass(frozen=True)
class Made:
    """The result of the program at this position."""

    position: int


@dataclass(frozen=True)
class Size:
    """A size, from the sizes of the call."""

    dim: Dim


@dataclass(frozen=True, eq=False)
class Replay:
    """A call of a function on the host. Its operands are `Given`, `Made`, `Size`, constants and other replays, also nested."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def reads(self) -> set[int]:
        """The indices of the arguments that it reads."""
        return {operand.index for operand in self._operands() if isinstance(operand, Given)}

    def made(self) -> list[int]:
        """The positions of the results of the program that it reads."""
        return sorted({operand.position for operand in self._operands() if isinstance(operand, Made)})

    def _operands(self) -> list:
        """The operands, and those of replays among them."""
        found: list = []

        def look(operand: Any) -> Any:
            found.extend(operand._operands() if isinstance(operand, Replay) else [operand])
            return operand

        fx.node.map_aggregate((self.args, self.kwargs), look)
        return found

    def run(self, arguments: Sequence, made: Sequence | Mapping[int, torch.Tensor], bindings: Bindings) -> torch.Tensor:
        """The result, for the arguments of a call, the results of the program and the sizes."""

        def value(operand: Any) -> Any:
            match operand:
                case Given(index):
                    return arguments[index].detach()
                case Made(position):
                    return made[position]
                case Size(dim):
                    return evaluate(dim, bindings)
                case Replay():
                    return operand.run(arguments, made, bindings)
            return operand

        return self.function(*fx.node.map_aggregate(self.args, value), **fx.node.map_aggregate(self.kwargs, value))


@dataclass(frozen=True)
class PartResults:
    """What the host makes itself.

    outputs  results of the model, by position
    writes   for an input that the model writes into, by index: the writes, in order
    count    how many results the model has, if the program makes more of them for the host
    """

    outputs: dict[int, Replay] = field(default_factory=dict)
    writes: dict[int, tuple[Replay, ...]] = field(default_factory=dict)
    count: int = 0

    def __bool__(self) -> bool:
        return bool(self.outputs or self.writes)
