"""A block's forward and backward in one ATen graph, and the two graphs that it is cut into once it is known what forward saves.

A value that forward saves is an additional result of forward and an operand of backward. What backward needs besides, and does not
depend on an arriving gradient, it computes again. The operations are those of the one graph, so each value has the same bits
whether it is saved or computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.graph import dims_of_memory
from l2l_compile.lowering.costs import is_free, written
from l2l_compile.lowering.randomness import Draw
from l2l_compile.lowering.widening import storages_of

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Joint:
    """Forward and backward of a block in one graph: (sizes, operands, gradients of outputs, draws) -> (outputs, gradients).

    outputs    how many results of forward there are
    gradients  how many gradients of outputs arrive
    operands   how many placeholders stand in front of these gradients: sizes, weights and values
    varying    which of them differ from micro-batch to micro-batch
    present    for each operand of the block, whether it has a gradient
    """

    graph: fx.GraphModule
    draws: tuple[Draw, ...]
    outputs: int
    gradients: int
    operands: int
    varying: frozenset[int]
    present: tuple[bool, ...]

    @functools.cached_property
    def arriving(self) -> list[fx.Node]:
        """The placeholders of the gradients that arrive."""
        return self._placeholders[self.operands : self.operands + self.gradients]

    @property
    def _placeholders(self) -> list[fx.Node]:
        return self.graph.graph.find_nodes(op="placeholder")

    @functools.cached_property
    def reads(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the nodes on which it depends: its operands, and those that have written into their memory before."""
        return _dependencies(self.graph.graph)

    @functools.cached_property
    def of_backward(self) -> frozenset[fx.Node]:
        """The nodes that depend on a gradient that arrives."""
        found = set(self.arriving)
        for node in self.graph.graph.nodes:
            if node.op != "output" and any(read in found for read in self.reads[node]):
                found.add(node)
        return frozenset(found)

    @functools.cached_property
    def of_rows(self) -> frozenset[fx.Node]:
        """The nodes that depend on a value of a micro-batch, or on a draw: others are the same in each micro-batch."""
        found = {*self.drawn, *(self._placeholders[i] for i in self.varying)}
        for node in self.graph.graph.nodes:
            if node.op != "output" and any(read in found for read in self.reads[node]):
                found.add(node)
        return frozenset(found)

    @functools.cached_property
    def returned(self) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
        """The outputs of forward, and the gradients."""
        (results,) = arguments(self.graph.graph.output_node())
        return results[: self.outputs], results[self.outputs :]

    @functools.cached_property
    def needed(self) -> list[fx.Node]:
        """The values of forward that the operations of backward read, or that are gradients themselves."""
        read = [r for node in self.graph.graph.nodes if node in self.of_backward for r in self.reads[node]]
        found = dict.fromkeys([*read, *self.returned[1]])
        return [node for node in found if node not in self.of_backward]

    @functools.cached_property
    def drawn(self) -> list[fx.Node]:
        """The placeholders that are random draws, in their order."""
        return self._placeholders[self.operands + self.gradients :]

    @functools.cached_property
    def asserted(self) -> list[fx.Node]:
        """The operations of forward that return nothing: assertions of the model, which forward makes."""
        return [node for node in self.graph.graph.nodes if _returns_nothing(node) and node not in self.of_backward]

    @functools.cached_property
    def _not_free(self) -> frozenset[int]:
        """The storages of operands, and those into which operations write."""
        operands = (storage for operand in self._placeholders for storage in storages_of(operand))
        return frozenset(
            {*(storage._cdata for storage in operands), *(s for n in self.graph.graph.nodes for s in _written_by(n))}
        )

    def can_save(self, node: fx.Node) -> bool:
        """Whether a value may be saved: a random draw, or a dense tensor of forward in memory of its own that nothing writes into.

        What is computed of weights alone, such as weights that were stored in 4 bits, would be saved in each micro-batch.
        """
        value = node.meta.get("val")
        if node in self.drawn:
            return True
        if not isinstance(value, torch.Tensor) or node.op != "call_function" or node in self.of_backward:
            return False
        if node in self.returned[1] or node not in self.of_rows:
            return False
        if value.layout is not torch.strided or isinstance(node.target, OpOverload) and is_free(node.target):
            return False
        return value.untyped_storage()._cdata not in self._not_free and dims_of_memory(value) is not None

    def cut(self, saved: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward: (sizes, operands, draws) -> (outputs, saved values), and backward: (sizes, operands, gradients of outputs, saved
        values, draws) -> gradients. Saved values are contiguous, and share no memory with each other or with outputs.
        """
        return self._forward(saved), self._backward(saved)

    def draws_of(self, graph: fx.GraphModule) -> tuple[Draw, ...]:
        """The draws that a graph of `cut` takes, in order."""
        draws = {node.target: draw for node, draw in zip(self.drawn, self.draws, strict=True)}
        return tuple(draws[n.target] for n in graph.graph.find_nodes(op="placeholder") if n.target in draws)

    def _copy(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in self.graph.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return graph, copies

    def _forward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        graph, copies = self._copy()
        results = [copies[node] for node in self.returned[0]]
        taken = {storage._cdata for node in self.returned[0] for storage in storages_of(node)}
        for node in saved:
            result = _in_order(graph, copies[node], node)
            if (storage := node.meta["val"].untyped_storage()._cdata) in taken:
                result = graph.call_function(aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
                result.meta["val"] = _contiguous(node)
            taken.add(storage)
            results.append(result)
        graph.output(tuple(results))
        _leave_out_unread(graph, [copies[node] for node in self.asserted])
        for arriving in self.arriving:
            graph.erase_node(copies[arriving])
        return self._module(graph, copies)

    def _backward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        graph, copies = self._copy()
        behind = self._placeholders[self.operands + self.gradients - 1]
        before = copies[behind].next  # the first draw, or the first operation
        for number, node in enumerate(saved):
            with graph.inserting_before(before):
                operand = graph.placeholder(f"saved_{number}")
            operand.meta["val"] = _contiguous(node)
            with graph.inserting_before(copies[node]):
                copies[node].replace_all_uses_with(_as_made(graph, operand, node))
        graph.output(tuple(copies[node] for node in self.returned[1]))
        _leave_out_unread(graph)
        return self._module(graph, copies)

    def _module(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.GraphModule:
        for draw in self.drawn:
            if not copies[draw].users:
                graph.erase_node(copies[draw])
        return fx.GraphModule(self.graph, graph)


def _leave_out_unread(graph: fx.Graph, besides: Sequence[fx.Node] = ()) -> None:
    """Erase operations on which no result depends, also those that PyTorch takes for random although they draw nothing here.

    Those of `besides` stay, with what they depend on.
    """
    reads, waiting = _dependencies(graph), [graph.output_node(), *besides]
    found = set(waiting)
    while waiting:
        for read in reads[waiting.pop()]:
            if read not in found:
                found.add(read)
                waiting.append(read)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and node not in found:
            graph.erase_node(node)


def _dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    writers: dict[int, list[fx.Node]] = {}  # by storage
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        touched = {storage._cdata for read in node.all_input_nodes for storage in storages_of(read)} if writers else ()
        before = [writer for storage in touched for writer in writers.get(storage, ())]
        found[node] = [*node.all_input_nodes, *before]
        for storage in _written_by(node):
            writers.setdefault(storage, []).append(node)
    return found


def _written_by(node: fx.Node) -> set[int]:
    """The storages that an operation writes into."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return set()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
    return {tensor.untyped_storage()._cdata for tensor in written(node.target, args, kwargs) if tensor.layout is torch.strided}


def _returns_nothing(node: fx.Node) -> bool:
    """Whether an operation has no result and writes into nothing: it is there for the error that it may raise."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns and not node.target._schema.is_mutable


def _order(node: fx.Node) -> list[int]:
    """The dimensions of a value in the order of its memory."""
    dims = dims_of_memory(node.meta["val"])
    assert dims is not None, f"{node.name} is not dense"
    return dims


def _contiguous(node: fx.Node) -> torch.Tensor:
    """The fake value of a contiguous tensor with the entries of a value in the order of its memory."""
    value = node.meta["val"]
    with value.fake_mode:
        return torch.empty([value.shape[dim] for dim in _order(node)], dtype=value.dtype, device=value.device)


def _in_order(graph: fx.Graph, copy: fx.Node, node: fx.Node) -> fx.Node:
    """A view of a value with its dimensions in the order of its memory: contiguous."""
    if (order := _order(node)) == sorted(order):
        return copy
    result = graph.call_function(aten.permute.default, (copy, order))
    value = node.meta["val"]
    with value.fake_mode:
        result.meta["val"] = value.permute(order)
    return result


def _as_made(graph: fx.Graph, operand: fx.Node, node: fx.Node) -> fx.Node:
    """A saved value with the dimensions and strides that it was made with."""
    if (order := _order(node)) == sorted(order):
        return operand
    inverse = sorted(range(len(order)), key=order.__getitem__)
    result = graph.call_function(aten.permute.default, (operand, inverse))
    value = operand.meta["val"]
    with value.fake_mode:
        result.meta["val"] = value.permute(inverse)
    return result
