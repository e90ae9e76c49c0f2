"""Fingerprints of graphs: tuples that can be compared. Operations, constants and their types count; names do not.

Two blocks with equal fingerprints are the same function of their operands, in any model or capture, so they can share one
lowering.
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
from l2l_compile.ir.segments import Block, BlockFingerprint, symbolic_size
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


def constant_fingerprint(value: Any) -> tuple:
    """The fingerprint of a constant: type and repr, which keep 1, 1.0, True, 0.0 and -0.0 apart. Other objects count by identity."""
    return "const", type(value).__name__, repr(value) if isinstance(value, _TOLD_BY_REPR) else _Same(value)


def argument_fingerprint(value: Any, node: Callable[[fx.Node], tuple]) -> tuple:
    """The fingerprint of an argument of an operation; `node` gives the fingerprint of a node in it."""
    if isinstance(value, fx.Node):
        return node(value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(argument_fingerprint(v, node) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, argument_fingerprint(v, node)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", *(argument_fingerprint(v, node) for v in (value.start, value.stop, value.step)))
    return constant_fingerprint(value)


def _no_size(name: str) -> tuple:
    raise LookupError(f"{name} is a symbolic size in a graph that is given none")


def graph_fingerprint(module: fx.GraphModule, size: Callable[[str], tuple] = _no_size) -> tuple:
    """The fingerprint of a whole graph. `size` gives the fingerprint of a `symbolic_size`, by its name.

    A tensor that the graph holds is compared by identity.
    """
    number: dict[fx.Node, int] = {}

    def node_fingerprint(node: fx.Node) -> tuple:
        if node.target is not symbolic_size:
            return "node", number[node]
        (name,) = arguments(node)
        return size(name)

    def operation(node: fx.Node) -> tuple:
        if node.op == "placeholder":
            return (node.op,)
        if node.op == "get_attr":
            value = attribute(module, node)
            return node.op, graph_fingerprint(value) if isinstance(value, fx.GraphModule) else _Same(value)
        return (
            node.op,
            node.target,
            argument_fingerprint(node.args, node_fingerprint),
            argument_fingerprint(node.kwargs, node_fingerprint),
        )

    body = []
    for node in module.graph.nodes:
        if node.target is not symbolic_size:
            number[node] = len(number)
            body.append(operation(node))
    return tuple(body)


def block_fingerprint(block: Block, numbers: Bindings) -> BlockFingerprint:
    """The fingerprint of a block, with numbers in place of some of its symbols; cached by these numbers."""
    known = block.fingerprints.get(key := tuple(numbers.items()))
    if known is None:
        known = block.fingerprints[key] = present_fingerprint(block, numbers)
    return known


def present_fingerprint(block: Block, numbers: Bindings) -> BlockFingerprint:
    """`block_fingerprint` without the cache, for a block that passes may still change."""
    return _Namer(numbers).fingerprint(block)


def _new_symbol(symbol: sympy.Symbol, number: int) -> sympy.Symbol:
    if is_float(symbol):
        return sympy.Symbol(f"x{number}", real=True)
    return sympy.Symbol(f"n{number}", integer=True, positive=True)


class _Namer:
    """Gives symbols new names in the order in which they are met."""

    def __init__(self, numbers: Bindings):
        self._numbers = numbers
        self._named: dict[sympy.Symbol, sympy.Symbol] = {}

    def fingerprint(self, block: Block) -> BlockFingerprint:
        size = lambda name: self._dim(block.sizes[name])  # noqa: E731
        border = tuple(tuple(map(self._spec, specs)) for specs in (block.weights, block.values, block.outputs))
        values = block.autocast, block.mutated, border, graph_fingerprint(block.graph, size)
        gradients = tuple(spec.requires_grad for spec in (*block.operands, *block.outputs))
        return BlockFingerprint((values, gradients), values, tuple(self._named))

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
        return constant_fingerprint(int(dim))
