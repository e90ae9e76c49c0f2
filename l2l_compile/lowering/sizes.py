"""Numbers that stay symbolic while a block is traced and compiled, and the guards of the resulting code.

A block is traced once for all sizes of its symbols: `Sizes.numbers` are PyTorch's symbolic integers, which have the sizes of
the first call as hints. When PyTorch makes a decision by a size (a broadcast of 1, a window that applies beyond a length, the
index type of a kernel), it records the condition in its `ShapeEnv`. `Guards` has these conditions. The code runs at other
sizes only if all of them hold.

Floats that the user gives (a temperature that changes from call to call) are symbols in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from l2l_compile.ir.values import Bindings, reads_floats, substitute


class Sizes:
    """The sizes that a block is traced with: `bindings`, of which `symbols` stay symbolic. Sizes among them are 2 or more.

    `numbers` are the symbols as symbolic integers and floats, in order.
    """

    def __init__(self, bindings: Bindings, symbols: Sequence[sympy.Symbol] = ()):
        self.bindings, self.symbols = bindings, tuple(symbols)
        self._names: list[sympy.Symbol] = []
        self.numbers: tuple[int | float, ...] = ()
        self.environment: ShapeEnv | None = None
        if self.symbols:
            self.environment = environment = ShapeEnv()
            self.numbers = tuple(self._number(environment, f"size {i}", bindings[s]) for i, s in enumerate(self.symbols))

    def with_symbols(self, numbers: Sequence[int | float]) -> Bindings:
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

    def _number(self, environment: ShapeEnv, name: str, hint: int | float) -> int | float:
        """A new symbolic integer or float. It can be used like an int or a float."""
        source = ConstantSource(name)
        if isinstance(hint, float):
            symbol = environment.create_unspecified_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            self._names.append(symbol)
            return cast(float, environment.create_symfloatnode(symbol, hint=hint, source=source))
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._names.append(symbol)
        return cast(int, environment.create_symintnode(symbol, hint=hint, source=source))


def _exact_range(value: int | float) -> ValueRanges:
    """The range of a size that has one value. A float has no range: a condition says its value."""
    return ValueRanges.unknown() if isinstance(value, float) else ValueRanges(value, value)


@dataclass(frozen=True)
class Guards:
    """Conditions on the values of symbols, and a range for each symbol. `symbolic` if the symbols are operands of the code."""

    symbols: tuple[sympy.Symbol, ...] = ()
    conditions: tuple[sympy.Basic, ...] = ()
    ranges: tuple[ValueRanges, ...] = ()
    symbolic: bool = False

    @classmethod
    def exactly(cls, values: Sequence[int | float]) -> Guards:
        """The guards of code that is valid for these numbers alone."""
        symbols = tuple(sympy.Symbol(f"n{i}", integer=None if isinstance(v, float) else True) for i, v in enumerate(values))
        exactly = (sympy.Eq(s, sympy.Float(v)) for s, v in zip(symbols, values, strict=True) if isinstance(v, float))
        return cls(symbols, tuple(exactly), tuple(_exact_range(value) for value in values))

    def hold(self, values: Sequence[int | float]) -> bool:
        """Whether the code with these guards is valid for these values. A float has no range."""
        ranges = zip(values, self.ranges, strict=True)
        if any(value not in allowed for value, allowed in ranges if not isinstance(value, float)):
            return False
        bindings = dict(zip(self.symbols, values, strict=True))
        return all(substitute(condition, bindings) == sympy.true for condition in self.conditions)

    def hold_for_floats(self, values: Sequence[int | float]) -> bool:
        """As `hold`, for values with the sizes of values for which the guards hold, and other floats."""
        bindings = dict(zip(self.symbols, values, strict=True))
        return all(substitute(condition, bindings) == sympy.true for condition in self._conditions_on_floats)

    @functools.cached_property
    def fix_float(self) -> bool:
        """Whether the code is valid for one value of a float alone: PyTorch computed with its value."""
        return any(isinstance(condition, sympy.Eq) for condition in self._conditions_on_floats)

    @functools.cached_property
    def _conditions_on_floats(self) -> tuple[sympy.Basic, ...]:
        return tuple(condition for condition in self.conditions if reads_floats(condition))
