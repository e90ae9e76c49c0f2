"""Removes pairs of casts: a block widens 16-bit operands, and often narrows them to the same dtype again.

Under CMP, every operation sees the dtypes that it would see under autocast with parameters in fp32. Autocast narrows most
matrices immediately, back to the dtype of the operand. Removing both casts changes no bit. If a gradient is computed in 16 bits
and only widened at the end, returning it in 16 bits changes no bit either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from l2l_compile.ir.fx_types import arguments, function_of, source_of

aten = torch.ops.aten
_SHORT = (torch.bfloat16, torch.float16)
_VIEWS = (  # views of dense memory: a cast keeps its layout
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


def cancel_round_trips(module: fx.GraphModule) -> None:
    """Replace a narrowed copy of a widened 16-bit operand, or of a view of it, by the operand or its view."""
    graph = module.graph
    kept = _written(graph) | _returned(graph)
    for operand in graph.find_nodes(op="placeholder"):
        _narrowed_again(graph, operand, kept)
    module.recompile()


def keep_results_narrow(module: fx.GraphModule, which: Sequence[int]) -> None:
    """Return the 16-bit values in place of their widened copies, for the results with these indices."""
    graph, end = module.graph, module.graph.output_node()
    (returned,) = arguments(end)
    results = list(returned)
    taken = _written(graph) | {s for node in graph.find_nodes(op="placeholder") for s in _storages(node)}
    for index in which:
        path: list[fx.Node] = []
        node = results[index]
        while isinstance(node, fx.Node) and (node.target in _VIEWS or node.target is aten.clone.default):
            path, node = [node, *path], source_of(node)
        if not isinstance(node, fx.Node) or not _casts(node) or not _widens(node):
            continue
        short = source_of(node)
        for step in path:
            short = _call_on(short, step, before=end)
        others = {s for i, result in enumerate(results) if i != index and isinstance(result, fx.Node) for s in _storages(result)}
        if not _value(short).is_contiguous() or _storages(short) & (taken | others):
            short = _call(end, aten.clone.default, (short,), {"memory_format": torch.contiguous_format})
        results[index] = short
    end.args = (tuple(results),)
    graph.eliminate_dead_code()
    module.recompile()


def _narrowed_again(graph: fx.Graph, short: fx.Node, kept: set[int]) -> None:
    for wide in [u for u in short.users if _casts(u) and _widens(u) and not _storages(u) & kept]:
        for user in list(wide.users):
            if _casts(user) and _value(user).dtype == _value(short).dtype and not _storages(user) & kept:
                user.replace_all_uses_with(short)
                graph.erase_node(user)
            elif user.target in _VIEWS:
                view = _call_on(short, user, before=user)
                with graph.inserting_before(user):
                    widened = graph.call_function(function_of(wide), (view,), wide.kwargs)
                widened.meta = dict(user.meta)
                user.replace_all_uses_with(widened)
                graph.erase_node(user)
                _narrowed_again(graph, view, kept)
        if not wide.users:
            graph.erase_node(wide)


def _call_on(source: fx.Node, step: fx.Node, before: fx.Node) -> fx.Node:
    """The same operation as `step`, on the tensor `source`."""
    _, *options = arguments(step)
    return _call(before, function_of(step), (source, *options), step.kwargs)


def _call(before: fx.Node, function: Callable, args: tuple, kwargs: dict) -> fx.Node:
    """A new operation before the node `before`. Only its first argument may be a tensor."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(function, args, kwargs)
    source, *options = args
    value = _value(source)
    with value.fake_mode:
        made.meta["val"] = function(value, *fx.node.map_arg(options, _value), **fx.node.map_arg(kwargs, _value))
    return made


def _casts(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default or "memory_format" in node.kwargs:
        return False
    before, after = _value(source_of(node)), _value(node)
    return (before.device, before.layout) == (after.device, after.layout)


def _widens(node: fx.Node) -> bool:
    return _value(source_of(node)).dtype in _SHORT and _value(node).dtype in (torch.float32, torch.float64)


def _value(node: fx.Node) -> FakeTensor:
    return node.meta["val"]


def storages_of(node: fx.Node) -> list[torch.UntypedStorage]:
    """The storages of an ATen node's results. A sparse result has no storage of its own."""
    return [
        v.untyped_storage()
        for v in tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor) and v.layout is torch.strided
    ]


def _storages(node: fx.Node) -> set[int]:
    return {storage._cdata for storage in storages_of(node)}


def _written(graph: fx.Graph) -> set[int]:
    """The storages that operations write into."""
    writers = [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    return {storage for n in writers for read in n.all_input_nodes for storage in _storages(read)}


def _returned(graph: fx.Graph) -> set[int]:
    """The storages of the graph's results, which share no memory with operands."""
    return {storage for node in graph.output_node().all_input_nodes for storage in _storages(node)}
