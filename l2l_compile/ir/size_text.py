"""Parses a size as SymPy prints it: `2*B*((s0//2) + 1)`. Nothing in the text is executed.

    sum      = product (("+" | "-") product)*
    product  = sign (("*" | "/" | "//") sign)*
    sign     = "-" sign | power
    power    = operand ("**" sign)?
    operand  = number | symbol | function "(" sum ("," sum)* ")" | "(" sum ")"

The functions are those of sizes (`_FUNCTIONS`). Numbers, exponents, functions, length and depth are bounded: a text of a line could
otherwise describe a number that fills the memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import Application
from torch.utils._sympy import functions as sympy_functions

_MOST_TOKENS, _MOST_DEPTH = 128, 32
_MOST_DIGITS, _MOST_BITS, _MOST_DEGREE = 19, 128, 8
_MOST_TERMS = 10  # different symbols and functions: the time that SymPy needs to simplify a product grows exponentially with them
_TOKEN = re.compile(r" *(?:(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)|(?P<name>[a-zA-Z_]\w*)|(?P<mark>\*\*|//|[-+*/(),]))", re.ASCII)


class SizeError(ValueError):
    """A text is no size. The message says why."""


@dataclass(frozen=True)
class _Function:
    """A function that a size may call: the numbers of operands that it takes."""

    function: Callable[..., Any]
    least: int
    most: int


def _functions(least: int, most: int, *names: str) -> dict[str, _Function]:
    found = {name: getattr(sympy_functions, name, None) for name in names}  # versions of PyTorch have different ones
    return {name: _Function(function, least, most) for name, function in found.items() if function is not None}


_FUNCTIONS = {
    **_functions(1, 1, "CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt", "ToFloat", "Identity"),
    **_functions(2, 2, "FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "IntTrueDiv", "FloatTrueDiv"),
    **_functions(3, 3, "ModularIndexing"),
    **_functions(1, 16, "Max", "Min"),
}
_DIVISORS = {"FloorDiv": (1,), "CleanDiv": (1,), "CeilDiv": (1,), "Mod": (1,), "PythonMod": (1,), "IntTrueDiv": (1,),
             "FloatTrueDiv": (1,), "ModularIndexing": (1, 2)}  # fmt: skip
_SUMS = {"+": operator.add, "-": operator.sub}
_PRODUCTS = {"*": operator.mul, "/": operator.truediv, "//": sympy_functions.FloorDiv}


@dataclass(frozen=True)
class _Size:
    """A part of a size: its expression, its value for the sizes of the program, and its degree as a polynomial."""

    expression: sympy.Expr
    value: sympy.Expr
    degree: int = 0


def parse_size(written: str, bindings: Mapping[sympy.Symbol, int]) -> int | sympy.Expr:
    """The size of a text, an int if it has no symbols. `bindings` are the symbols that it may name, and their values.

    Raises `SizeError` for a text that is no size, and for one that is larger than any size of a tensor.
    """
    size = _Parser(written, bindings).parse()
    if not size.value >= 0:
        raise SizeError("it is negative")
    if len(size.expression.atoms(sympy.Symbol, Application)) > _MOST_TERMS:
        raise SizeError(f"it has more than {_MOST_TERMS} different symbols and functions")
    if size.expression.is_number and not size.expression.is_Integer:
        raise SizeError("it is no whole number")
    return int(size.expression) if size.expression.is_Integer else size.expression


class _Parser:
    def __init__(self, written: str, bindings: Mapping[sympy.Symbol, int]):
        self.symbols = {str(symbol): _Size(symbol, _number(value).value, 1) for symbol, value in bindings.items()}
        self.tokens = _tokens(written)
        self.position, self.depth = 0, 0

    def parse(self) -> _Size:
        size = self._sum()
        if self.position < len(self.tokens):
            raise SizeError(f"{self._next()[1]!r} has no place in it")
        return size

    def _sum(self) -> _Size:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise SizeError(f"it is nested deeper than {_MOST_DEPTH}")
        size = self._product()
        while mark := self._mark(*_SUMS):
            size = self._joined(_SUMS[mark], size, other := self._product(), degree=max(size.degree, other.degree))
        self.depth -= 1
        return size

    def _product(self) -> _Size:
        size = self._sign()
        while mark := self._mark(*_PRODUCTS):
            other = self._sign()
            if mark != "*":
                _check_divisor(other)
            size = self._joined(_PRODUCTS[mark], size, other, degree=size.degree + other.degree)
        return size

    def _sign(self) -> _Size:
        negative = False
        while self._mark("-"):
            negative = not negative
        size = self._power()
        return _Size(-size.expression, -size.value, size.degree) if negative else size

    def _power(self) -> _Size:
        base = self._operand()
        if not self._mark("**"):
            return base
        exponent = self._exponent()
        if exponent < 0:
            _check_divisor(base)
        return self._joined(operator.pow, base, _number(exponent), degree=base.degree * abs(exponent))

    def _exponent(self) -> int:
        """A number such as 2, -1 or (-1): with a larger one, or a symbol, the power would have no bound."""
        in_parentheses, negative = self._mark("("), self._mark("-")
        kind, written = self._next()
        if kind != "number" or not written.isdigit() or int(written) > _MOST_DEGREE:
            raise SizeError(f"an exponent is a number up to {_MOST_DEGREE}, not {written!r}")
        if in_parentheses:
            self._expect(")")
        return -int(written) if negative else int(written)

    def _operand(self) -> _Size:
        kind, written = self._next()
        if kind == "number":
            return _number(int(written) if written.isdigit() else float(written))
        if kind == "name" and self._mark("("):
            return self._call(written)
        if kind == "name" and written in self.symbols:
            return self.symbols[written]
        if written == "(":
            size = self._sum()
            self._expect(")")
            return size
        raise SizeError(f"{written!r} is none of its symbols" if kind == "name" else f"an operand is missing before {written!r}")

    def _call(self, name: str) -> _Size:
        function = _FUNCTIONS.get(name)
        if function is None:
            raise SizeError(f"no function of sizes is called {name!r}")
        operands = [self._sum()]
        while self._mark(","):
            operands.append(self._sum())
        self._expect(")")
        if not function.least <= len(operands) <= function.most:
            raise SizeError(f"{name} does not take {len(operands)} operands")
        for position in _DIVISORS.get(name, ()):
            _check_divisor(operands[position])
        return self._joined(function.function, *operands, degree=max(size.degree for size in operands))

    def _joined(self, function: Callable[..., Any], *sizes: _Size, degree: int) -> _Size:
        """The result of an operation. Its value is checked first: the expression of a large number would be one too."""
        if degree > _MOST_DEGREE:
            raise SizeError(f"it has a degree of more than {_MOST_DEGREE}")
        value = _applied(function, [size.value for size in sizes])
        _check_value(value)
        return _Size(_applied(function, [size.expression for size in sizes]), value, degree)

    def _next(self) -> tuple[str, str]:
        if self.position == len(self.tokens):
            raise SizeError("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1]

    def _mark(self, *marks: str) -> str | None:
        """The next token, if it is one of these marks."""
        if self.position < len(self.tokens) and self.tokens[self.position][1] in marks:
            return self._next()[1]
        return None

    def _expect(self, mark: str) -> None:
        if not self._mark(mark):
            raise SizeError(f"{mark!r} is missing")


def _tokens(written: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position, end = 0, len(written.rstrip())
    while position < end:
        match = _TOKEN.match(written, position)
        if match is None:
            raise SizeError(f"{written[position : position + 20]!r} is no part of a size")
        found.append((match.lastgroup or "", match[match.lastgroup or 0]))
        if len(found) > _MOST_TOKENS:
            raise SizeError(f"it has more than {_MOST_TOKENS} parts")
        if found[-1][0] == "number" and len(found[-1][1]) > _MOST_DIGITS:
            raise SizeError(f"a number has more than {_MOST_DIGITS} digits")
        position = match.end()
    return found


def _number(value: int | float) -> _Size:
    number = sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)
    _check_value(number)
    return _Size(number, number)


def _applied(function: Callable[..., Any], operands: list[sympy.Expr]) -> sympy.Expr:
    try:
        return function(*operands)
    except Exception as error:  # SymPy raises errors of any type for operands that a function does not expect
        raise SizeError(f"it has no value: {type(error).__name__}") from error


def _check_divisor(size: _Size) -> None:
    if size.value == 0 or size.expression == 0:
        raise SizeError("it divides by zero")


def _check_value(value: sympy.Expr) -> None:
    if not (value.is_number and value.is_real and value.is_finite):
        raise SizeError("it is no number")
    bits = max(value.p.bit_length(), value.q.bit_length()) if value.is_Rational else 0
    if bits > _MOST_BITS or abs(value) >= 2**_MOST_BITS:
        raise SizeError("it is larger than any tensor")
