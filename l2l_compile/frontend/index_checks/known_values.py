"""Values of a captured graph that are known on the host before a step: integers and booleans that do not depend on a parameter.

Inputs, buffers and constants of these types are known, and sizes, and the results of PyTorch's operations on known values. A
value is unknown if it depends on a parameter, on a random draw or on floating point, or is made in a transform of `torch.func`.

A write into memory that the graph itself made leaves the value known: to compute the value is to repeat the write as well. An
input is unknown from the first write into its memory on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable

import torch
from torch import fx

from l2l_compile.devices.host import is_host
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.graph import is_pure, memory_of, written_operands
from l2l_compile.ir.values import Dim, dim_of


class KnownValues:
    """The values that are known before an operation. A walk through the graph calls `visit` to pass each operation."""

    def __init__(self, captured: Captured):
        outside = [n for n in captured.graph.nodes if n.op in ("placeholder", "get_attr")]
        self._of_others = {memory_of(n) for n in outside}
        self._parameters = {i.node for i in captured.inputs if i.kind == "parameter"}
        self._known: set[fx.Node] = set()
        self._writers: dict[int, list[fx.Node]] = {}  # by memory, in order
        self._lost: set[int | None] = set()  # memory with unknown contents

    def __contains__(self, node: fx.Node) -> bool:
        return size_of(node) is not None or (node in self._known and memory_of(node) not in self._lost)

    def visit(self, node: fx.Node) -> None:
        """Pass an operation: note its result, and its writes."""
        written = {memory_of(operand) for operand in written_operands(node)}
        if not written:
            if self._can_be_known(node):
                self._known.add(node)
        elif is_of_tensors(node) and not written & self._of_others and self._has(node.all_input_nodes):
            self._known.add(node)
            for memory in written:
                if memory is not None:
                    self._writers.setdefault(memory, []).append(node)
        else:
            self._lost |= written

    def writes_into(self, node: fx.Node) -> list[fx.Node]:
        """The operations so far that have written into the memory of a known value."""
        memory = memory_of(node)
        return self._writers.get(memory, []) if memory is not None else []

    def leads_to(self, node: fx.Node) -> set[fx.Node]:
        """A known value, all nodes that it is computed from except sizes, and the writes into its memory so far."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            found.add(node := waiting.pop())
            before = [*node.all_input_nodes, *self.writes_into(node)]
            waiting += [n for n in before if n not in found and size_of(n) is None]
        return found

    def _has(self, nodes: Iterable[fx.Node]) -> bool:
        return all(node in self for node in nodes)

    def _can_be_known(self, node: fx.Node) -> bool:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
            return False
        if memory_of(node) is None or not is_host(value.device):  # inside of a transform, a tensor has no memory
            return False
        if node.op == "placeholder":
            return node not in self._parameters
        return node.op == "get_attr" or (is_of_tensors(node) and is_pure(node) and self._has(node.all_input_nodes))


def size_of(node: fx.Node) -> Dim | None:
    """The integer that a node stands for, a constant or an expression of sizes; None for any other node."""
    value = node.meta.get("example_value")
    return dim_of(value) if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else None


def is_of_tensors(node: fx.Node) -> bool:
    """Whether an operation is built into PyTorch or Python (or is a method), and draws no random numbers."""
    if node.op == "call_method":
        return not _draws(str(node.target))
    return isinstance(node.target, types.BuiltinFunctionType) and not _draws(node.target.__name__)


@functools.cache
def _draws(name: str) -> bool:
    operation = getattr(torch.ops.aten, name, None)
    if not isinstance(operation, torch._ops.OpOverloadPacket):  # aten.__and__ is a method of Python's in 2.11
        return False
    overloads = [getattr(operation, overload) for overload in operation.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
