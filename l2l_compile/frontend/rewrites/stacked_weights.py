"""Parameters that hold the weights of several layers, `[layers, ...]`: each slice becomes a weight of its own.

    for i in range(depth):                       %w_0 = slice 0 of w      a weight of the first layer
        x = torch.tanh(x @ w[i])         =>      %w_1 = slice 1 of w      a weight of the second

A slice is fetched alone, and its gradient is pushed alone, into its place in the gradient of the parameter. A tensor counts as
such a slice if it is contiguous, and is read through an index, a slice, `unbind`, `select` or `narrow` with constant numbers.
Results of `chunk` and `split` do not count: layers use them to take fused projections apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from l2l_compile.ir.captured import Input, ParameterSlice
from l2l_compile.ir.graph import first_operation, is_pure

_TAKEN = {operator.getitem, torch.select, torch.narrow, torch.unbind, "select", "narrow", "unbind"}
_SAME = {torch.reshape, "view", "reshape", "contiguous", "unflatten", torch.unflatten}


def slice_of(whole: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A slice of a parameter (`ir.captured.ParameterSlice`); the captured graph calls this function in its place."""
    return whole.view(-1)[start : start + torch.Size(shape).numel()].view(shape)


def take_slices_apart(graph: fx.Graph, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Give each slice of a stacked parameter its own node. Returns these, as inputs of kind "parameter" after `inputs`."""
    found: list[Input] = []
    for whole in inputs:
        if whole.kind == "parameter" and whole.shard_spec is None:  # with shards, a slice of the parameter is no slice of a shard
            found += _slices(graph, whole, len(inputs) + len(found))
    return tuple(found)


def _slices(graph: fx.Graph, whole: Input, first_index: int) -> list[Input]:
    parameter = whole.node.meta["example_value"]
    if not parameter.is_contiguous() or not all(isinstance(size, int) for size in parameter.shape):
        return []
    readers: dict[tuple, list[fx.Node]] = {}
    for node in _slice_nodes(whole.node):
        value = node.meta["example_value"]
        readers.setdefault((value.storage_offset(), tuple(value.shape), value.requires_grad), []).append(node)
    if len({offset for offset, *_ in readers}) < 2:
        return []
    found: list[Input] = []
    for (offset, shape, _), nodes in readers.items():
        cut = ParameterSlice(whole.index, offset - parameter.storage_offset(), shape)
        name = f"{whole.name}{_place_of(cut, parameter)}"
        with graph.inserting_before(first_operation(graph)):
            weight = graph.call_function(slice_of, (whole.node, cut.start, cut.shape))  # Dynamo counts placeholders
        weight.meta["example_value"] = nodes[0].meta["example_value"]
        for node in nodes:
            node.replace_all_uses_with(weight)
            _erase_unread(graph, node)
        found.append(Input(first_index + len(found), weight, name, "parameter", cut))
    return found


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node without readers, and then its operand if that has no reader left, and so on."""
    while node.op.startswith("call_") and not node.users:
        (read,) = node.all_input_nodes
        graph.erase_node(node)
        node = read


def _slice_nodes(start: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are contiguous slices of a parameter. Where a slice is taken from a slice, only the smallest is given."""
    memory = start.meta["example_value"].untyped_storage()._cdata
    waiting = [user for user in start.users if _takes(user)]
    while waiting:
        node = waiting.pop(0)
        value = node.meta.get("example_value")
        further = [user for user in node.users if _takes(user)]
        if isinstance(value, tuple):  # of unbind
            waiting += further
        elif not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata != memory or not value.is_contiguous():
            continue
        elif value.numel() == start.meta["example_value"].numel() or len(further) == len(node.users):
            waiting += further
        elif all(is_pure(user) for user in node.users):
            yield node


def _takes(node: fx.Node) -> bool:
    """Whether a node takes a part of its operand by constant numbers, or gives all of it in another shape."""
    return node.op.startswith("call_") and node.target in _TAKEN | _SAME and len(node.all_input_nodes) == 1


def _place_of(cut: ParameterSlice, parameter: torch.Tensor) -> str:
    """The slice as text, in the way a person would write it: "[3]", "[3:5]", or by its first entry in memory."""
    row = parameter.stride(0) if parameter.ndim else 1
    rows, rest = divmod(torch.Size(cut.shape).numel(), row)
    at, inside = divmod(cut.start, row)
    if rest or inside:
        return f"[entry {cut.start} on]"
    return f"[{at}]" if rows == 1 else f"[{at}:{at + rows}]"
