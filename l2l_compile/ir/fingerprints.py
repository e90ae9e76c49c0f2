"""Forms of graphs: tuples that can be compared. Operations, constants and their types count; names do not.

Two blocks of equal form are the same function of their operands, in any model or capture, so they can share one lowering.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from l2l_compile.ir.fx_types import arguments, attribute
from l2l_compile.ir.segments import Block, BlockForm, symbolic_size
from l2l_compile.ir.values import Bindings, Dim, TensorSpec, is_float, substitute

_TOLD_BY_REPR = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(None),
    type(Ellipsis),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object compared by identity. It keeps the object alive, so that no other object gets the same address."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_form(value: Any) -> tuple:
    """The form of a constant: type and repr, which keep 1, 1.0, True, 0.0 and -0.0 apart. Other objects count by identity."""
    return "const", type(value).__name__, repr(value) if isinstance(value, _TOLD_BY_REPR) else _Same(value)


def argument_form(value: Any, node: Callable[[fx.Node], tuple]) -> tuple:
    """The form of an argument of an operation; `node` gives the form of a node in it."""
    if isinstance(value, fx.Node):
        return node(value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(argument_form(v, node) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, argument_form(v, node)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", *(argument_form(v, node) for v in (value.start, value.stop, value.step)))
    return constant_form(value)


def _no_size(name: str) -> tuple:
    raise LookupError(f"{name} is a symbolic size in a graph that is given none")


def graph_form(module: fx.GraphModule, size: Callable[[str], tuple] = _no_size) -> tuple:
    """The form of a whole graph. `size` gives the form of a `symbolic_size`, by its name.

    A tensor that the graph holds is compared by identity.
    """
    number: dict[fx.Node, int] = {}

    def node_form(node: fx.Node) -> tuple:
        if node.target is not symbolic_size:
            return "node", number[node]
        (name,) = arguments(node)
        return size(name)

    def operation(node: fx.Node) -> tuple:
        if node.op == "placeholder":
            return (node.op,)
        if node.op == "get_attr":
            value = attribute(module, node)
            return node.op, graph_form(value) if isinstance(value, fx.GraphModule) else _Same(value)
        return node.op, node.target, argument_form(node.args, node_form), argument_form(node.kwargs, node_form)

    body = []
    for node in module.graph.nodes:
        if node.target is not symbolic_size:
            number[node] = len(number)
            body.append(operation(node))
    return tuple(body)


def block_form(block: Block, numbers: Bindings) -> BlockForm:
    """The form of a block, with numbers in place of some of its symbols; cached by these numbers."""
    known = block.forms.get(key := tuple(numbers.items()))
    if known is None:
        known = block.forms[key] = present_form(block, numbers)
    return known


def present_form(block: Block, numbers: Bindings) -> BlockForm:
    """`block_form` without the cache, for a block that passes may still change."""
    return _Namer(numbers).form(block)


def _new_symbol(symbol: sympy.Symbol, number: int) -> sympy.Symbol:
    if is_float(symbol):
        return sympy.Symbol(f"x{number}", real=True)
    return sympy.Symbol(f"n{number}", integer=True, positive=True)


class _Namer:
    """Gives symbols new names in the order in which they are met."""

    def __init__(self, numbers: Bindings):
        self._numbers = numbers
        self._named: dict[sympy.Symbol, sympy.Symbol] = {}

    def form(self, block: Block) -> BlockForm:
        size = lambda name: self._dim(block.sizes[name])  # noqa: E731
        border = tuple(tuple(map(self._spec, specs)) for specs in (block.weights, block.values, block.outputs))
        values = block.autocast, block.mutated, border, graph_form(block.graph, size)
        gradients = tuple(spec.requires_grad for spec in (*block.operands, *block.outputs))
        return BlockForm((values, gradients), values, tuple(self._named))

    def _spec(self, spec: TensorSpec) -> tuple:
        return tuple(map(self._dim, spec.shape)), spec.dtype, spec.compute_dtype

    def _dim(self, dim: Dim) -> tuple:
        if not isinstance(dim, int):
            dim = substitute(dim, self._numbers)
            for symbol in sorted(dim.free_symbols - self._named.keys(), key=str):
                self._named[symbol] = _new_symbol(symbol, len(self._named))
            dim = dim.xreplace(self._named)
            if dim.free_symbols:
                return "size", str(dim)
        return constant_form(int(dim))
