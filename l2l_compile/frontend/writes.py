"""Tensors of the model that the model itself writes into: their readers in Dynamo's graph, and the tensors that are states.

A buffer that a single operation touches (BatchNorm's running mean) stays a weight of that operation's segment. A buffer that
one operation writes and another touches is a *state*. Examples are spectral norm's vectors, a counter, a moving average, and
the statistics of a BatchNorm that is called twice. A state is not a weight: every segment would fetch a weight as it was before
the step. A state is a value that goes from segment to segment, and each write makes a new version of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..ir.captured import Input
from .simplify import drop_dead, hint_of, is_pure, memory_of, writes

AT_READER = "at_reader"  # in the meta of a view right before its reader: it belongs to the reader's segment

_STATISTICS = (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def settle_writes(graph: fx.Graph) -> None:
    """Give each input that the graph writes into one node, which all its readers read; changes the graph in place.

    The result of a write is the written tensor itself (`y = x.add_(1)`), so readers of `y` read `x` instead. A view of `x` is
    made right before each of its readers, so that no view crosses from one segment to another.
    """
    written = _written_inputs(graph)
    first: dict[int, fx.Node] = {}  # by the identity of the tensor that Dynamo ran the graph on
    for node in graph.nodes:
        if memory_of(node) in written:
            earlier = first.setdefault(id(node.meta["example_value"]), node)
            if earlier is not node and writes(node):
                node.replace_all_uses_with(earlier)
    for node in reversed(list(graph.nodes)):
        if node.op.startswith("call_") and memory_of(node) in written and is_pure(node):
            _make_at_readers(graph, node)
    drop_dead(graph)


def with_states(inputs: Sequence[Input], graph: fx.Graph) -> tuple[Input, ...]:
    """The inputs, with the kind "state" for weights that are states.

    A trained parameter stays a weight: its gradient belongs to the segments that read it.
    """
    touched = touches(graph.nodes, _written_inputs(graph))

    def is_state(i: Input) -> bool:
        memory = memory_of(i.node)
        if not i.is_weight or memory is None:
            return False
        return not i.node.meta["example_value"].requires_grad and len(touched.get(memory, ())) > 1

    return tuple(replace(i, kind="state") if is_state(i) else i for i in inputs)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation writes into, according to its schema, its name or its arguments."""
    if node.target in _STATISTICS:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        training = bound.arguments.get("training", bound.arguments.get("use_input_stats"))
        return _nodes([bound.arguments["running_mean"], bound.arguments["running_var"]]) if training else []
    if not writes(node):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        declared = [a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments]
        names = [a.name for a in node.target._schema.arguments]
        by_name = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return _nodes([by_name.get(name) for name, is_write in zip(names, declared, strict=True) if is_write])
    if "out" in node.kwargs:
        return _nodes(node.kwargs["out"])
    return _nodes(node.args[0] if node.args else node.kwargs.get("input"))


def share_memory(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors may have entries in common: they are in one storage, and their ranges of entries overlap."""
    if one is other or memory_of(one) is None or memory_of(one) != memory_of(other):
        return False
    first, second = sorted((_range(one.meta["example_value"]), _range(other.meta["example_value"])), key=lambda r: r.start)
    return second.start < first.stop


def _range(value: torch.Tensor) -> range:
    """The range from the first to the last entry of a tensor, counted in entries of its storage."""
    start = hint_of(value.storage_offset())
    reach = sum((hint_of(size) - 1) * hint_of(stride) for size, stride in zip(value.shape, value.stride(), strict=True))
    return range(start, start + reach + 1)


def _nodes(arguments: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, fx.Node)]


def _written_inputs(graph: fx.Graph) -> set[int]:
    """The storages of the inputs that the graph writes into, without leaves that require a gradient."""
    untrained = [memory_of(p) for p in graph.find_nodes(op="placeholder") if not _is_trained(p)]
    inputs = {memory for memory in untrained if memory is not None}
    return inputs & {memory_of(operand) for node in graph.nodes for operand in written_operands(node)}


def _is_trained(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def touches(nodes: Iterable[fx.Node], memories: Iterable[int | None]) -> dict[int, list[fx.Node]]:
    """For each storage, the operations that read it or write into it. Operations that only make a view do not count."""
    found: dict[int, list[fx.Node]] = {memory: [] for memory in memories if memory is not None}
    for node in nodes:
        if not node.op.startswith("call_"):
            continue
        for memory in found.keys() & {memory_of(a) for a in node.all_input_nodes}:
            if memory_of(node) != memory or not is_pure(node):
                found[memory].append(node)
    return found


def _make_at_readers(graph: fx.Graph, view: fx.Node) -> None:
    for reader in [user for user in view.users if user.op != "output"]:
        with graph.inserting_before(reader):
            own = graph.node_copy(view)
        own.meta[AT_READER] = True
        reader.replace_input_with(view, own)
