"""Elementwise ATen operations as C expressions of `real`, in the order of operations of PyTorch's own kernels.

Operands are names of C variables. `FMA` is a multiply-add that rounds once where the processor has one, as ATen's
vectorized kernels do. Comparisons give an `int`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def _add(a: str, b: str, alpha: str | None = None) -> str:
    return f"{a} + {b}" if alpha is None else f"FMA({b}, {alpha}, {a})"


def _sub(a: str, b: str, alpha: str | None = None) -> str:
    return f"{a} - {b}" if alpha is None else f"FMA({b}, -{alpha}, {a})"


def _rsub(a: str, b: str, alpha: str | None = None) -> str:
    return _sub(b, a, alpha)


def _addcmul(a: str, b: str, c: str, value: str | None = None) -> str:
    return f"FMA({b}, {c}, {a})" if value is None else f"FMA({value} * {b}, {c}, {a})"


def _addcdiv(a: str, b: str, c: str, value: str | None = None) -> str:
    return f"{a} + {b} / {c}" if value is None else f"{a} + {value} * {b} / {c}"


def _lerp_from_start(a: str, b: str, weight: str) -> str:
    return f"FMA({weight}, {b} - {a}, {a})"


def _lerp_from_end(a: str, b: str, weight: str) -> str:
    return f"FMA({weight} - 1, {b} - {a}, {b})"


def _clamp(a: str, low: str | None = None, high: str | None = None) -> str:
    if low is not None:
        a = f"({a} < {low} ? {low} : {a})"
    return a if high is None else f"({a} > {high} ? {high} : {a})"


_FORMULAS: dict[str, Callable[..., str]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": lambda a, b: f"{a} * {b}",
    "div": lambda a, b: f"{a} / {b}",
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "sqrt": lambda a: f"SQRT({a})",
    "rsqrt": lambda a: f"1 / SQRT({a})",
    "reciprocal": lambda a: f"1 / {a}",
    "neg": lambda a: f"-{a}",
    "abs": lambda a: f"({a} < 0 ? -{a} : {a})",
    "sign": lambda a: f"(real)(({a} > 0) - ({a} < 0))",
    "square": lambda a: f"{a} * {a}",
    "maximum": lambda a, b: f"({a} != {a} || {a} > {b}) ? {a} : {b}",
    "minimum": lambda a, b: f"({a} != {a} || {a} < {b}) ? {a} : {b}",
    "clamp": _clamp,
    "clamp_min": lambda a, low: _clamp(a, low),
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "where": lambda condition, a, b: f"{condition} ? {a} : {b}",
    "gt": lambda a, b: f"{a} > {b}",
    "lt": lambda a, b: f"{a} < {b}",
    "ge": lambda a, b: f"{a} >= {b}",
    "le": lambda a, b: f"{a} <= {b}",
    "eq": lambda a, b: f"{a} == {b}",
    "ne": lambda a, b: f"{a} != {b}",
    "clone": lambda a: a,
    "detach": lambda a: a,
    "alias": lambda a: a,
    "copy_": lambda a, b: b,
    "fill_": lambda a, b: b,
    "zero_": lambda a: "0",
    "zeros_like": lambda a: "0",
    "ones_like": lambda a: "1",
    "full_like": lambda a, b: b,
}
_POWERS: dict[float, Callable[[str], str]] = {
    2.0: _FORMULAS["square"],
    0.5: _FORMULAS["sqrt"],
    -0.5: _FORMULAS["rsqrt"],
    -1.0: _FORMULAS["reciprocal"],
    1.0: _FORMULAS["clone"],
}
COMPARISONS = frozenset({"gt", "lt", "ge", "le", "eq", "ne"})

# keyword arguments that change no value
IGNORED = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "out"})


def formula_of(name: str, arguments: Sequence[Any]) -> tuple[Callable[..., str], Sequence[Any]] | None:
    """The formula of an operation with these arguments, and the arguments that are its operands; None if it has no formula.

    `name` is the name of the overload packet. A name that ends in "_" is also found without it.
    """
    plain = name if name in _FORMULAS else name.removesuffix("_")
    number = arguments[-1] if arguments and isinstance(arguments[-1], (int, float)) else None
    if plain == "lerp" and number is not None:
        return (_lerp_from_start if abs(number) < 0.5 else _lerp_from_end), arguments
    if plain == "pow" and number in _POWERS:
        return _POWERS[number], arguments[:1]
    return (_FORMULAS[plain], arguments) if plain in _FORMULAS else None
