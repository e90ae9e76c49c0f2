"""Rewrites of Dynamo's graph that change no number: sizes and constants spelled out, writes and dead operations removed."""
from __future__ import annotations

import operator
import types
from typing import Any

import torch
from torch import fx

_SILENT = {torch._C._log_api_usage_once}  # calls that only count uses of an API


def simplify(graph: fx.Graph) -> None:
    """Bring a graph, in place, into the form that the passes read."""
    _specialize_floats(graph)
    _spell_sizes(graph)
    _count_in_place(graph)
    _write_anew(graph)
    drop_dead(graph)


def _specialize_floats(graph: fx.Graph) -> None:
    """A Python float that Dynamo made symbolic (a dropout rate that changed) becomes its value, under a guard."""
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, (torch.SymFloat, torch.SymBool)) and node.op.startswith("call_"):
            if any(s.is_integer for s in value.node.expr.free_symbols):
                continue  # computed from a size: specialising it would fix the size of the batch
            node.replace_all_uses_with(float(value) if isinstance(value, torch.SymFloat) else bool(value))
            graph.erase_node(node)


def _spell_sizes(graph: fx.Graph) -> None:
    """`x.size()`, read by others as a whole or entry by entry, becomes its entries, which are numbers."""
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Size) or node.op == "placeholder":
            continue
        entries = _entries(graph, node)
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int) and isinstance(entries[user.args[1]], fx.Node):
                user.replace_all_uses_with(entries[user.args[1]])
                graph.erase_node(user)
            else:
                user.args, user.kwargs = _replaced((user.args, user.kwargs), node, tuple(entries))


def _entries(graph: fx.Graph, node: fx.Node) -> list:
    """The numbers of a size: of a tensor, or made from sizes that are spelled out already."""
    if isinstance(node.args[0], tuple):
        return list(node.target(*node.args, **node.kwargs))
    entries: list = []
    with graph.inserting_after(node):
        for dim, size in enumerate(node.meta["example_value"]):
            if isinstance(size, torch.SymInt):
                entries.append(graph.call_method("size", (node.args[0], dim)))
                entries[-1].meta = {**node.meta, "example_value": size}
            else:
                entries.append(size)
    return entries


def _replaced(arguments: Any, node: fx.Node, by: tuple) -> Any:
    """Arguments of a call with a tuple in the place of a node."""
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_replaced(a, node, by) for a in arguments)
    if isinstance(arguments, dict):
        return {k: _replaced(a, node, by) for k, a in arguments.items()}
    return by if arguments is node else arguments


_ANEW = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv}


def _write_anew(graph: fx.Graph) -> None:
    """`x += y` on an intermediate value that nobody reads under its old name afterwards becomes `x = x + y`."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if (memory := _memory(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _ANEW:
            continue
        written, value = node.args[0], node.meta.get("example_value")
        memory = _memory(node)
        if memory is None or not isinstance(written, fx.Node) or value.requires_grad and value.is_leaf:
            continue
        others = [n for n in sharing[memory] if order[n] < order[node]]
        read_later = any(order[user] > order[node] for n in others for user in n.users)
        if read_later or any(n.op != "call_function" and n.op != "call_method" for n in others):
            continue  # an input, or seen through another value
        operands = [a.meta.get("example_value") if isinstance(a, fx.Node) else a for a in node.args]
        if all(isinstance(o, torch.Tensor | int | float) for o in operands) and torch.result_type(*operands) == value.dtype:
            if not isinstance(operands[1], torch.Tensor) or torch.broadcast_shapes(value.shape, operands[1].shape) == value.shape:
                node.target = _ANEW[node.target]


def _memory(node: fx.Node) -> int | None:
    """The storage of a tensor; None for other values, and within functorch's transforms."""
    value = node.meta.get("example_value")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


def _count_in_place(graph: fx.Graph) -> None:
    """`torch.arange` over a symbolic size is made anew for each reader: a segment that numbers rows sees that it does."""
    for node in graph.find_nodes(op="call_function", target=torch.arange):
        size = node.meta["example_value"].shape[0]
        for reader in list(node.users)[1:] if isinstance(size, torch.SymInt) else ():
            with graph.inserting_before(reader):
                own = graph.node_copy(node)
            reader.replace_input_with(node, own)
        if isinstance(size, torch.SymInt) and node.users:
            next(iter(node.users)).prepend(node)


def drop_dead(graph: fx.Graph) -> None:
    """Erase operations whose result nobody reads and that change nothing; in doubt, they stay."""
    for node in reversed(list(graph.nodes)):
        if node.op.startswith("call_") and not node.users and (node.target in _SILENT or is_pure(node)):
            graph.erase_node(node)


def is_pure(node: fx.Node) -> bool:
    """Whether an operation surely writes into none of its arguments; in doubt, it is not pure."""
    if not isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt, int)):
        return False
    if any(a is True for a in node.args) or "inplace" in node.kwargs or "out" in node.kwargs:
        return False  # functional.relu(x, True) writes into x
    if node.op == "call_method":
        return not node.target.endswith("_")
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return name != "setitem" and not (name.startswith("i") and hasattr(operator, name[1:]))
    return isinstance(node.target, types.BuiltinFunctionType) and not name.endswith("_")
