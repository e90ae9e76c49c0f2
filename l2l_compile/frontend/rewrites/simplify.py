"""Rewrites of Dynamo's graph that change no result: sizes and constants written out, writes and dead operations removed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.frontend.rewrites.recurrent_stacks import split_stacks
from l2l_compile.ir.fx_types import arguments, function_of
from l2l_compile.ir.graph import ANEW, dims_of_memory, drop_dead, is_pure, may_be_size, memory_of, writes


def simplify(graph: fx.Graph) -> None:
    """Bring a graph, in place, into the form that the passes read."""
    _write_out_numbers(graph)
    for inner in _inner_graphs(graph):
        _write_out_numbers(inner, all_of_them=True)
    split_stacks(graph)
    _spell_sizes(graph)
    _spell_squeezed(graph)
    _make_in_place(graph)
    _write_anew(graph)
    _write_by_mask(graph)
    _lay_out_for_strides(graph)
    drop_dead(graph)


def _inner_graphs(graph: fx.Graph) -> list[fx.Graph]:
    """The graphs that operators of this graph are given, such as those of an `autograd.Function`."""
    modules = graph.owning_module.modules() if graph.owning_module is not None else ()
    return [module.graph for module in modules if isinstance(module, fx.GraphModule) and module.graph is not graph]


def _write_out_numbers(graph: fx.Graph, all_of_them: bool = False) -> None:
    """Replace floats that a guard fixes (a dropout rate), and conditions on floats that the model computes with, by values.

    A condition in a computation is `x * (t > 0)`; it gets a guard. Other floats that change stay symbols, but not within the
    graphs of an `autograd.Function` (`all_of_them`): these read them from tensors. A guard then fixes each of them.
    """
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, (torch.SymFloat, torch.SymBool)) or not node.op.startswith("call_"):
            continue
        if any(s.is_integer for s in value.node.expr.free_symbols):
            continue  # computed from a size: specialising it would fix the size of the batch
        if isinstance(value, torch.SymBool):
            node.replace_all_uses_with(bool(value))
        elif all_of_them or value.node.expr.is_number:
            node.replace_all_uses_with(float(value))
        if not node.users:
            graph.erase_node(node)


def _spell_sizes(graph: fx.Graph) -> None:
    """Replace `x.size()` by its entries (ints and `x.size(dim)`), where it is read as a whole and where one entry is read."""
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


def _spell_squeezed(graph: fx.Graph) -> None:
    """Name the dimensions that `x.squeeze()` drops, so that it drops the same ones for every size of a micro-batch."""
    for node in graph.nodes:
        if node.target in ("squeeze", torch.squeeze) and len(node.args) == 1 and not node.kwargs:
            sizes, made = node.args[0].meta["example_value"].shape, node.meta["example_value"]
            dropped = tuple(dim for dim, size in enumerate(sizes) if isinstance(size, int) and size == 1)
            if len(sizes) - len(dropped) == made.ndim:
                node.args = (node.args[0], dropped)


def _entries(graph: fx.Graph, node: fx.Node) -> list:
    """The entries of a `torch.Size`, which is the size of a tensor or is computed from sizes that are written out already."""
    if isinstance(node.args[0], tuple):
        return list(function_of(node)(*node.args, **node.kwargs))
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
    """The arguments of a call, with the tuple `by` in the place of a node."""
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_replaced(a, node, by) for a in arguments)
    if isinstance(arguments, dict):
        return {k: _replaced(a, node, by) for k, a in arguments.items()}
    return by if arguments is node else arguments


def _write_anew(graph: fx.Graph) -> None:
    """Turn `x += y` into `x = x + y` if `x` is an intermediate value whose memory is not read later by another node."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if (memory := memory_of(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in ANEW:
            continue
        written, value = node.args[0], node.meta.get("example_value")
        memory = memory_of(node)
        if memory is None or not isinstance(written, fx.Node) or value.requires_grad and value.is_leaf:
            continue
        others = [n for n in sharing[memory] if order[n] < order[node]]
        read_later = any(order[user] > order[node] for n in others for user in n.users)
        if read_later or any(n.op != "call_function" and n.op != "call_method" for n in others):
            continue  # memory of an input, or read later by another node
        operands = [1.0 if isinstance(o, torch.SymFloat) else o for o in map(_example, node.args)]
        if all(isinstance(o, torch.Tensor | int | float) for o in operands) and torch.result_type(*operands) == value.dtype:
            if not isinstance(operands[1], torch.Tensor) or torch.broadcast_shapes(value.shape, operands[1].shape) == value.shape:
                node.target = ANEW[node.target]


def _write_by_mask(graph: fx.Graph) -> None:
    """Turn `x[mask] = v` with one `v` for all entries into `x.copy_(torch.where(mask, v, x))`: its gradient has fixed sizes."""
    for node in graph.find_nodes(op="call_function", target=operator.setitem):
        x, mask, v = arguments(node)
        examples = [_example(a) for a in (x, mask, v)]
        if not all(isinstance(e, torch.Tensor) for e in examples):
            continue
        written_value, mask_value, v_value = examples
        inner = written_value.ndim - mask_value.ndim
        if mask_value.dtype is not torch.bool or v_value.ndim > inner:
            continue

        def put(target: Any, *args: Any, node: fx.Node = node) -> fx.Node:
            with graph.inserting_before(node):
                made = graph.call_function(target, args)
            made.meta = {**node.meta, "example_value": target(*fx.node.map_arg(args, lambda read: read.meta["example_value"]))}
            return made

        opened = put(operator.getitem, mask, (..., *[None] * inner)) if inner else mask
        chosen = put(torch.where, opened, v, x)
        with graph.inserting_before(node):
            written = graph.call_method("copy_", (x, chosen))
        written.meta = {**node.meta, "example_value": written_value}
        graph.erase_node(node)


def _example(argument: Any) -> Any:
    """The value of an argument in Dynamo's trace: the fake value of a node, or the constant itself."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def _make_in_place(graph: fx.Graph) -> None:
    """Copy an operation on numbers alone in front of each of its readers, so that each copy is in the segment of its reader.

    A segment then sees that `torch.arange` over a symbolic size numbers the rows. A number that PyTorch holds in a tensor
    (`torch.div` of two numbers) may be used as a size, and then its value must be known in the segment.
    """
    for node in reversed(list(graph.nodes)):
        if not _is_of_numbers(node) or not node.users:
            continue
        for reader in list(node.users)[1:]:
            with graph.inserting_before(reader):
                own = graph.node_copy(node)
            reader.replace_input_with(node, own)
        next(iter(node.users)).prepend(node)


def _lay_out_for_strides(graph: fx.Graph) -> None:
    """Give `x.as_strided(...)` a copy of `x` with the memory layout that `x` had in Dynamo's trace: it reads memory by strides.

    Raises `L2LError` if the memory of `x` holds more than `x`, or if an operation writes into it afterwards.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in ("as_strided", torch.as_strided) or memory_of(node) is None:
            continue
        source = node.args[0] if node.args else node.kwargs["input"]
        dims = dims_of_memory(source.meta["example_value"])
        sharing = [n for n in order if memory_of(n) == memory_of(node)]
        written = any(order.get(user, 0) > order[node] and writes(user) for n in sharing for user in n.users)
        if dims is None or written:
            raise L2LError(
                f"'{node.name}' is a view by strides (as_strided) of memory that {'is written into' if written else 'holds more than its tensor'}, "
                "which cannot be cut into segments: use slices or unfold, or a copy of the tensor (x.clone())"
            )
        for method, args in (("permute", (dims,)), ("contiguous", ())):
            with graph.inserting_before(node):
                made = graph.call_method(method, (source, *args))
            made.meta = {**node.meta, "example_value": getattr(source.meta["example_value"], method)(*args)}
            source = made
        node.args, node.kwargs = ((source, *node.args[1:]), node.kwargs) if node.args else ((), {**node.kwargs, "input": source})


def _is_of_numbers(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is torch.arange:
        return isinstance(node.meta["example_value"].shape[0], torch.SymInt)
    return may_be_size(node) and all(user.op == "output" or is_pure(user) for user in node.users)
