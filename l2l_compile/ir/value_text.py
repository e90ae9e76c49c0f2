"""Parses the description of a value in the text of a program: `x: float32[s0, 8], split, grad  128 B`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from l2l_compile.errors import ParseError
from l2l_compile.ir import text
from l2l_compile.ir.operand_text import count_of, shown
from l2l_compile.ir.size_text import SizeError, parse_size
from l2l_compile.ir.values import Bindings, Dim, TensorSpec, find_batch

_VALUE = re.compile(r"(?P<value>[^:]+): (?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?P<flags>(?:, [\w ]+?)*)  (?P<bytes>.+)")
_FLAGS, _PARTIAL = (text.SPLIT, text.EQUAL_ROWS, text.GRADIENT, text.STREAMED), ("sum", "mean")
_TURN = re.compile(rf"{text.TURN}[0-9]+", re.ASCII)
_MOST_BYTES, _MOST_DIMENSIONS = 2**63, 64


@dataclass(frozen=True)
class Description:
    """The name of a value, its spec, and its flags."""

    value: str
    spec: TensorSpec
    split: bool
    streamed: bool
    turn: int | None


def parse_value(written: str, sizes: Bindings, batch: sympy.Symbol | None, line: int) -> Description | None:
    """The description in a text; None for a text that has not the form of one.

    Raises `ParseError` for a dtype, a size or a flag that no value has.
    """
    match = _VALUE.fullmatch(written)
    if match is None:
        return None
    shape = tuple(_dim(part, sizes, line) for part in _between_commas(match["shape"]))
    flags = _flags(match, line)
    partial = next((f.removeprefix(text.PARTIAL) for f in flags if f.startswith(text.PARTIAL)), None)
    width = next((f.removeprefix(text.COMPUTES_IN) for f in flags if f.startswith(text.COMPUTES_IN)), None)
    spec = replace(
        _sized(shape, _dtype(match["dtype"], line), sizes, batch, line),
        requires_grad=text.GRADIENT in flags,
        partial=partial,
        compute_dtype=_dtype(width, line) if width is not None else None,
        equal_rows=text.EQUAL_ROWS in flags,
    )
    turn = next((count_of(f.removeprefix(text.TURN), line) for f in flags if f.startswith(text.TURN)), None)
    return Description(match["value"], spec, text.SPLIT in flags or turn is not None, text.STREAMED in flags, turn)


def _sized(shape: tuple[Dim, ...], dtype: torch.dtype, sizes: Bindings, batch: sympy.Symbol | None, line: int) -> TensorSpec:
    """The spec of a shape. Raises `ParseError` for one that no tensor has."""
    try:
        rows, mixed = find_batch(shape, batch)
        spec = TensorSpec(shape, dtype, False, rows, mixed)
        is_large = spec.bytes(sizes) >= _MOST_BYTES
    except Exception as error:  # SymPy raises errors of any type for sizes that it cannot simplify
        raise ParseError(line, f"the shape [{_joined(shape)}] has no value: {type(error).__name__}") from error
    if is_large or len(shape) > _MOST_DIMENSIONS:
        raise ParseError(line, f"the shape [{_joined(shape)}] is larger than any tensor")
    return spec


def _dim(part: str, sizes: Bindings, line: int) -> Dim:
    try:
        return parse_size(part, sizes)
    except SizeError as error:
        raise ParseError(line, f"cannot read the size {shown(part)}: {error}") from error


def _flags(match: re.Match, line: int) -> list[str]:
    """The flags of a value. Raises `ParseError` for one that no value has."""
    flags = _between_commas(match["flags"].removeprefix(", "))
    for flag in flags:
        if flag not in _FLAGS and not flag.startswith((text.COMPUTES_IN, text.PARTIAL)) and not _TURN.fullmatch(flag):
            raise ParseError(line, f"a value has no flag {shown(flag)}; there are {', '.join(_FLAGS)}")
        if flag.startswith(text.PARTIAL) and flag.removeprefix(text.PARTIAL) not in _PARTIAL:
            raise ParseError(line, f"the parts of a sum are of kind {' or '.join(_PARTIAL)}, not {shown(flag)}")
    return flags


def _joined(shape: Sequence[Dim]) -> str:
    return shown(", ".join(map(str, shape)))[1:-1]


def _between_commas(written: str) -> list[str]:
    """The parts between the commas of a list. A comma within parentheses does not separate."""
    parts, start, depth = [], 0, 0
    for position, letter in enumerate(written):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(written[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, written[start:]) if part.strip()]


def _dtype(name: str, line: int) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ParseError(line, f"no dtype is called {shown(name)}")
    return found
