"""Sizes that stay symbolic while a block is traced and compiled, and the guards of the resulting code.

A block is traced once for all sizes of its symbols: `Sizes.numbers` are PyTorch's symbolic integers, which have the sizes of
the first call as hints. When PyTorch makes a decision by a size (a broadcast of 1, a window that applies beyond a length, the
index type of a kernel), it records the condition in its `ShapeEnv`. `Guards` has these conditions. The code runs at other
sizes only if all of them hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from ..ir.values import Bindings, substitute


class Sizes:
    """The sizes that a block is traced with: `bindings`, of which `symbols` stay symbolic. Their values are 2 or more.

    `numbers` are the symbols as symbolic integers, in order.
    """

    def __init__(self, bindings: Bindings, symbols: Sequence[sympy.Symbol] = ()):
        self.bindings, self.symbols = bindings, tuple(symbols)
        self._names: list[sympy.Symbol] = []
        self.numbers: tuple[int, ...] = ()
        self.environment: ShapeEnv | None = None
        if self.symbols:
            self.environment = environment = ShapeEnv()
            self.numbers = tuple(self._number(environment, f"size {i}", bindings[s]) for i, s in enumerate(self.symbols))

    def with_symbols(self, numbers: Sequence[int]) -> Bindings:
        """The bindings with these numbers for the symbols."""
        return {**self.bindings, **dict(zip(self.symbols, numbers, strict=True))}

    @property
    def names(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that PyTorch uses for `numbers`, in order."""
        return tuple(self._names)

    def decide(self, conditions: Sequence[sympy.Basic]) -> bool:
        """Whether the conditions on `names` of an earlier trace hold at these sizes. If so, they become guards here."""
        hints = {name: self.bindings[symbol] for name, symbol in zip(self._names, self.symbols, strict=True)}
        if not all(substitute(condition, hints) == sympy.true for condition in conditions):
            return False
        if self.environment is not None:
            for condition in conditions:
                self.environment.evaluate_expr(condition)
        return True

    def guards(self) -> Guards:
        """The conditions of all decisions by sizes so far."""
        if self.environment is None:
            return Guards()
        conditions = tuple(guard.expr for guard in self.environment.guards)
        ranges = tuple(map(self.environment.var_to_range.__getitem__, self._names))
        return Guards(tuple(self._names), conditions, ranges, symbolic=True)

    def _number(self, environment: ShapeEnv, name: str, hint: int) -> int:
        """A new symbolic integer. It can be used like an int."""
        source = ConstantSource(name)
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._names.append(symbol)
        return cast(int, environment.create_symintnode(symbol, hint=hint, source=source))


@dataclass(frozen=True)
class Guards:
    """Conditions on the values of symbols, and a range for each symbol. `symbolic` if the symbols are operands of the code."""

    symbols: tuple[sympy.Symbol, ...] = ()
    conditions: tuple[sympy.Basic, ...] = ()
    ranges: tuple[ValueRanges, ...] = ()
    symbolic: bool = False

    @classmethod
    def exactly(cls, values: Sequence[int]) -> Guards:
        """The guards of code that is valid for these numbers alone."""
        symbols = tuple(sympy.Symbol(f"n{i}") for i in range(len(values)))
        return cls(symbols, ranges=tuple(ValueRanges(value, value) for value in values))

    def hold(self, values: Sequence[int]) -> bool:
        """Whether the code with these guards is valid for these values."""
        if any(value not in allowed for value, allowed in zip(values, self.ranges, strict=True)):
            return False
        bindings = dict(zip(self.symbols, values, strict=True))
        return all(substitute(condition, bindings) == sympy.true for condition in self.conditions)
