"""The fingerprint of a piece of the sequence: two pieces with equal fingerprints compute the same function of their operands.

The fingerprint lists every operation with its target, its constants (with their types) and the spec of its result. An argument
that is made in the piece appears as the offset of its operation within the piece. Any other argument appears as the
number of an operand; operands are numbered in the order in which they are first read. Equality of fingerprints is the proof that
two layers may share one lowered block. Layers have different fingerprints if they differ in an eps, an activation, a shape, a
dtype, a frozen parameter, the operand that an operation reads, or the results that are used outside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from l2l_compile.ir.captured import Input
from l2l_compile.ir.fingerprints import argument_fingerprint, graph_fingerprint
from l2l_compile.ir.fx_types import attribute, name_of
from l2l_compile.ir.graph_modules import graph_module
from l2l_compile.ir.segments import Block, symbolic_size
from l2l_compile.ir.values import TensorSpec, float_operand, is_float
from l2l_compile.passes.operation_sequence import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD,
    OperationSequence,
    makes_number,
    size_expression,
)

OPERATION = "operation"  # in the meta of a block's node: the number of its operation within the piece


@dataclass(eq=False)
class Piece:
    """A range of the sequence with its operands, its outputs and its fingerprint."""

    span: range
    name: str
    weights: tuple[Input, ...]
    values: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    fingerprint: tuple
    floats: tuple[sympy.Symbol, ...] = ()  # of the user's, in the order in which they are first read

    @classmethod
    def of(cls, sequence: OperationSequence, span: range) -> Piece:
        reader = _Reader(sequence, span)
        body = tuple(map(reader.operation, reader.inside))
        outputs = tuple(n for n in reader.inside if _read_outside(n, reader.inside) and n in sequence.captured.specs)
        fingerprint = (
            sequence.modes[span.start].grad,
            tuple(reader.argument(a.args) for a in sequence.modes[span.start].autocasts),
            body,
            tuple(reader.operand_fingerprint(o) for o in reader.operands),
            tuple(reader.inside[n] for n in outputs),
        )
        weights = tuple(sequence.weights[o] for o in reader.operands if o in sequence.weights)
        values = tuple(o for o in reader.operands if o not in sequence.weights)
        return cls(span, _common_name(sequence, span), weights, values, outputs, fingerprint, tuple(reader.floats))


class _Reader:
    """Turns the operations of one piece into comparable tuples, numbering operands as they are first read."""

    def __init__(self, sequence: OperationSequence, span: range):
        self.sequence = sequence
        self.inside = {node: i for i, node in enumerate(operations(sequence, span))}
        self.operands: dict[fx.Node, int] = {}
        self.floats: dict[sympy.Symbol, int] = {}

    def operation(self, node: fx.Node) -> tuple:
        spec = self.sequence.captured.specs.get(node)
        return node.op, node.target, self.argument(node.args), self.argument(node.kwargs), spec

    def argument(self, value: Any) -> tuple:
        return argument_fingerprint(value, self.node)

    def node(self, node: fx.Node) -> tuple:
        if (size := size_expression(node)) is not None:
            if isinstance(size, sympy.Symbol) and is_float(size):
                return "float", self.floats.setdefault(size, len(self.floats))
            return "size", str(size)
        if makes_number(node):
            return "number", node.target, self.argument(node.args), self.argument(node.kwargs)
        if node in self.inside:
            return "inside", self.inside[node]
        if node.target in (ENTER_AUTOCAST,):  # opened before the piece: its position among the open autocasts
            return "autocast", self.sequence.modes[self.sequence.position[node] + 1].autocasts.index(node)
        if node.op == "get_attr" and node not in self.sequence.captured.specs:
            return "subgraph", self._subgraph(node)
        return "operand", self.operands.setdefault(node, len(self.operands))

    def operand_fingerprint(self, node: fx.Node) -> tuple:
        weight = self.sequence.weights.get(node)
        return weight.kind if weight else "value", self.sequence.captured.specs.get(node)

    def _subgraph(self, node: fx.Node) -> tuple:
        return graph_fingerprint(attribute(self.sequence.captured.module, node))


def operations(sequence: OperationSequence, span: range) -> list[fx.Node]:
    """The operations of a range, without operations that compute numbers: fingerprints and blocks contain the numbers themselves."""
    return [node for node in (sequence.nodes[i] for i in span) if not makes_number(node)]


def _read_outside(node: fx.Node, inside: dict[fx.Node, int]) -> bool:
    return any(user not in inside for user in node.users)


def _common_name(sequence: OperationSequence, span: range) -> str:
    """The module path shared by the operations that read parameters or, if no operation does, by all operations with a path.

    If no operation has a path, the name is the target of the last operation that makes a tensor.
    """
    paths = [sequence.paths[i] for i in span if sequence.paths[i]]
    with_weights = [
        sequence.paths[i]
        for i in span
        if sequence.paths[i]
        and any(a in sequence.weights and sequence.weights[a].kind == "parameter" for a in sequence.nodes[i].all_input_nodes)
    ]
    paths = with_weights or paths
    if not paths:
        made = [sequence.nodes[i].target for i in span if sequence.nodes[i] in sequence.captured.specs]
        return next((t if isinstance(t, str) else getattr(t, "__name__", "graph") for t in reversed(made)), "graph")
    counts = Counter(path[:n] for path in paths for n in range(1, len(path) + 1))
    full = [prefix for prefix, count in counts.items() if count == len(paths)]
    if full:
        longest = max(full, key=len)
        return ".".join(longest)
    return ".".join(paths[0]) + ".." + paths[-1][-1]


def build_block(sequence: OperationSequence, piece: Piece, name: str) -> Block:
    """The block of a piece: a new graph with copies of its operations, and a placeholder for each operand."""
    specs = sequence.captured.specs
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in (*(w.node for w in piece.weights), *piece.values):
        env[node] = graph.placeholder(node.name)
    mode, end = sequence.modes[piece.span.start], sequence.modes[piece.span.stop]
    if mode.grad != sequence.captured.grad_enabled:
        graph.call_function(SET_GRAD, (mode.grad,))
    opened = [(a, graph.call_function(ENTER_AUTOCAST, a.args)) for a in mode.autocasts]
    env.update(opened)
    attributes: dict[str, Any] = {}
    sizes: dict[str, sympy.Expr] = {}
    for number, node in enumerate(operations(sequence, piece.span)):
        env[node] = graph.node_copy(node, lambda n: _argument(sequence, piece, graph, env, attributes, sizes, n))
        env[node].meta[OPERATION] = number
    for autocast in reversed(end.autocasts):
        graph.call_function(EXIT_AUTOCAST, (env[autocast],))
    if end.grad != sequence.captured.grad_enabled:
        graph.call_function(SET_GRAD, (sequence.captured.grad_enabled,))
    graph.output(tuple(env[o] for o in piece.outputs))
    root = torch.nn.Module()
    for path, value in attributes.items():
        setattr(root, path, value)
    module = graph_module(graph, root if attributes else None)
    return Block(
        name=name,
        module=module,
        sizes=sizes,
        autocast=sequence.captured.autocast,
        weights=tuple(_weight_spec(sequence, piece, w.node) for w in piece.weights),
        values=tuple(specs[v] for v in piece.values),
        outputs=tuple(specs[o] for o in piece.outputs),
        static=sequence.captured.fixed_sizes,
    )


def _weight_spec(sequence: OperationSequence, piece: Piece, weight: fx.Node) -> TensorSpec:
    readers = [n for n in map(sequence.nodes.__getitem__, piece.span) if weight in n.all_input_nodes]
    looked_up = weight in sequence.captured.lookups and all(looks_rows_up(reader, weight) for reader in readers)
    return sequence.captured.lookups[weight] if looked_up else sequence.captured.specs[weight]


def looks_rows_up(node: fx.Node, table: fx.Node) -> bool:
    """Whether a node reads some rows of a table alone."""
    if node.target is not torch.nn.functional.embedding:
        return False
    arguments = dict(zip(("input", "weight", "padding_idx", "max_norm"), node.args, strict=False)) | node.kwargs
    return arguments["weight"] is table and arguments.get("max_norm") is None  # max_norm writes into rows


def _argument(
    sequence: OperationSequence, piece: Piece, graph: fx.Graph, env: dict, attributes: dict, sizes: dict, node: fx.Node
) -> Any:
    if node in env:
        return env[node]
    size = size_expression(node)
    if isinstance(size, (int, float)):
        return size
    if size is not None:
        if isinstance(size, sympy.Symbol) and is_float(size):
            size = float_operand(piece.floats.index(size))
        sizes[str(size)] = size
        return graph.call_function(symbolic_size, (str(size),))
    if makes_number(node):
        env[node] = graph.node_copy(node, lambda n: _argument(sequence, piece, graph, env, attributes, sizes, n))
        return env[node]
    if node.op == "get_attr":
        name = name_of(node)
        attributes[name] = attribute(sequence.captured.module, node)
        env[node] = graph.get_attr(name)
        return env[node]
    raise KeyError(node)
