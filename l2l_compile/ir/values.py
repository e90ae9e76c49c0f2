"""The description of a value before it exists: shape with symbols, dtype, and the dimension of its rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from l2l_compile.errors import LoweringError
from l2l_compile.ir.batch import Batch

Dim: TypeAlias = int | sympy.Expr
Bindings: TypeAlias = Mapping[sympy.Symbol, Any]  # an int for a size; a float for a number of the user's (`is_float`)


def evaluate(dim: Dim, bindings: Bindings) -> int:
    """The value of a size for these values of its symbols: an int, or a `torch.SymInt` if one of the values is one.

    The value of a symbol alone is the value in `bindings`: a float for a number of the user's.

    Raises `LoweringError` if the size has no value: `x.reshape(len(x) // 4, -1)` has no second size for a batch of one row.
    """
    if isinstance(dim, int):
        return dim
    if dim in bindings:
        return bindings[dim]
    if any(isinstance(bindings.get(s), (torch.SymInt, torch.SymFloat)) for s in dim.free_symbols):
        return sympy_interp(PythonReferenceAnalysis, dict(bindings), dim)
    return int(substitute(dim, bindings))


def substitute(dim: sympy.Expr, bindings: Bindings) -> sympy.Expr:
    """The size with numbers in place of symbols. Raises `LoweringError` for a division by zero."""
    try:
        return dim.xreplace({s: sympy.Float(v) if isinstance(v, float) else sympy.Integer(v) for s, v in bindings.items()})
    except ZeroDivisionError as error:
        sizes = ", ".join(f"{symbol} = {value}" for symbol, value in bindings.items() if symbol in dim.free_symbols)
        raise LoweringError(f"the size {dim} divides by zero where {sizes}") from error


def is_float(symbol: sympy.Symbol) -> bool:
    """Whether a symbol stands for a Python float that the user gives, such as a temperature. All others are sizes."""
    return not symbol.is_integer


@functools.cache
def float_operand(position: int) -> sympy.Symbol:
    """The symbol by which blocks name the float that they read first, second, ...: layers may read floats of their own."""
    return sympy.Symbol(f"x{position}", real=True)


@functools.lru_cache(maxsize=1024)
def reads_floats(expression: sympy.Basic) -> bool:
    """Whether one of the symbols in an expression stands for a float."""
    return any(is_float(symbol) for symbol in expression.free_symbols)


def dim_of(size: int | torch.SymInt) -> Dim:
    """A size of a fake tensor as an int or a sympy expression."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


@dataclass(frozen=True)
class TensorSpec:
    """Shape (ints and sympy expressions), dtype and gradient flag of a value. `batch` tells where its rows are.

    `mixed` marks a value whose shape has the batch symbol, but whose rows are not slices along one dimension (a [B, B] matrix,
    B + 1 entries): it can only be handled for the whole batch. `compute_dtype` is the dtype in which blocks compute with the
    value, if it differs from the dtype in which the value goes from block to block. `partial` marks a sum over rows: an
    inner-looped block makes a part of it in every micro-batch. With "sum", the parts are added up. With "mean", each part is
    first multiplied by its micro-batch's share of the rows. `equal_rows` marks a batched value of an inner-looped block whose
    rows are all equal: the block makes it once for all micro-batches.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    batch: Batch | None = None
    mixed: bool = False
    compute_dtype: torch.dtype | None = None
    partial: str | None = None
    equal_rows: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, batch_symbol: sympy.Symbol | None) -> TensorSpec:
        shape = tuple(dim_of(s) for s in tensor.shape)
        batch, mixed = find_batch(shape, batch_symbol)
        return cls(shape, tensor.dtype, tensor.requires_grad, batch, mixed)

    @property
    def differentiable(self) -> bool:
        return self.requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which its gradient goes from block to block."""
        return self.compute_dtype or self.dtype

    def sizes(self, bindings: Bindings) -> tuple[int, ...]:
        return tuple(evaluate(d, bindings) for d in self.shape)

    def bytes(self, bindings: Bindings) -> int:
        count = 1
        for size in self.sizes(bindings):
            count *= size
        return count * self.dtype.itemsize

    @property
    def rows(self) -> Batch:
        """Where the rows of a batched value are."""
        assert self.batch is not None, f"{self} has no rows"
        return self.batch

    @property
    def splits(self) -> bool:
        """Whether an inner-looped block makes it micro-batch by micro-batch."""
        return self.batch is not None or self.partial is not None

    @property
    def computed_once(self) -> bool:
        """Whether the first micro-batch of an inner-looped block makes it for all."""
        return self.equal_rows or not self.splits

    def detached(self) -> TensorSpec:
        """The spec of its gradient."""
        return replace(self, dtype=self.gradient_dtype, compute_dtype=None, requires_grad=False, equal_rows=False)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def find_batch(shape: tuple[Dim, ...], symbol: sympy.Symbol | None) -> tuple[Batch | None, bool]:
    """Where the rows are in a shape; and whether it is mixed: it has the batch symbol, but cannot be sliced by rows."""
    if symbol is None:
        return None, False
    found = [(i, d) for i, d in enumerate(shape) if not isinstance(d, int) and symbol in d.free_symbols]
    if not found:
        return None, False
    if len(found) > 1:
        return None, True
    index, expression = found[0]
    multiple = _multiple(expression, symbol)
    return (None, True) if multiple is None else (Batch(index, multiple), False)


@functools.lru_cache(maxsize=1024)
def _multiple(size: sympy.Expr, symbol: sympy.Symbol) -> Dim | None:
    """A size divided by the batch size, if that is an integer or an integer expression of other sizes; None otherwise."""
    multiple = sympy.simplify(size / symbol)
    if multiple.is_Integer:
        return int(multiple) if multiple > 0 else None
    of_others = multiple.is_integer and multiple.free_symbols and symbol not in multiple.free_symbols
    return multiple if of_others else None  # for example rows of symbolic length, flattened into one dimension


def rows_at(batch: Batch | None, bindings: Bindings) -> Batch | None:
    """Where the rows are at these sizes. `bindings` does not need the batch size."""
    return (
        batch if batch is None or isinstance(batch.multiple, int) else replace(batch, multiple=evaluate(batch.multiple, bindings))
    )
