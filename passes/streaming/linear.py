"""Whether the gradients of a segment depend on the contents of some of its operands.

A loss that is a sum or a mean of terms is linear in them: its gradients are known before the terms are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from l2l_compile.frontend.index_checks.known_values import is_of_tensors
from l2l_compile.ir.segments import Block

_SHAPES = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "expand",
    "permute",
    "transpose",
    "contiguous",
    "clone",
)
_SUMS = ("sum", "mean", "neg", "to", "float", "double")
_OF_FIRST: set[Any] = {  # linear in their first operand, whatever the others are
    *_SHAPES,
    *_SUMS,
    *(getattr(torch, name) for name in (*_SHAPES, *_SUMS) if hasattr(torch, name)),
    operator.neg,
    operator.getitem,
    F.nll_loss,
}
_QUOTIENTS: set[Any] = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide"}
_PRODUCTS: set[Any] = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply"}
_ADDITIONS: set[Any] = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "sub"}
_LISTS: set[Any] = {torch.stack, torch.cat}


def made_of(block: Block, output: int) -> set[int] | None:
    """The positions of the operands (weights, then values) of which an output is made; None if random numbers may be among them."""
    graph = block.graph.graph
    positions = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    seen: set[fx.Node] = set()
    waiting = [node for node in [_outputs(graph)[output]] if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    if not all(node.op == "placeholder" or is_of_tensors(node) for node in seen):
        return None
    return {positions[node] for node in seen if node in positions}


def nonlinear_operation(block: Block, unknown: Collection[int]) -> str | None:
    """The first operation because of which gradients may depend on the contents of the operands at these positions; None if there is none.

    The operands are weights, then values.
    """
    graph, operands = block.graph.graph, dict(zip(block.graph.graph.find_nodes(op="placeholder"), block.operands, strict=False))
    depends = {node for i, node in enumerate(operands) if i in unknown}
    others = {
        node for node, spec in operands.items() if spec.differentiable
    } - depends  # whose gradients a factor of theirs is in
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if not depends.isdisjoint(node.all_input_nodes):
            if not _is_linear(node, depends, others):
                return _name(node.target)
            depends.add(node)
        elif not others.isdisjoint(node.all_input_nodes):
            others.add(node)
    return None


def _is_linear(node: fx.Node, depends: set[fx.Node], others: set[fx.Node]) -> bool:
    """Whether no gradient of an operation depends on the contents of what it reads of `depends`."""
    read = [argument for argument in node.args if isinstance(argument, fx.Node) and argument in depends]
    if any(isinstance(argument, fx.Node) and argument in depends for argument in node.kwargs.values()):
        return False
    target = node.target
    if target in _ADDITIONS or target in _LISTS:
        return True
    if target in _PRODUCTS or target in _QUOTIENTS:
        return len(read) == 1 and others.isdisjoint(node.all_input_nodes) and (target in _PRODUCTS or read == [node.args[0]])
    return target in _OF_FIRST and read == [node.args[0]] and others.isdisjoint(node.all_input_nodes)


def _outputs(graph: fx.Graph) -> list[Any]:
    (result,) = graph.output_node().args
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _name(target: str | Callable) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
