"""Tensors of the model that the model itself writes into: their readers in Dynamo's graph, and the tensors that are states.

A buffer that a single operation touches (BatchNorm's running mean) stays a weight of that operation's segment. A buffer that
one operation writes and another touches is a *state*. Examples are spectral norm's vectors, a counter, a moving average, and
the statistics of a BatchNorm that is called twice. A state is not a weight: every segment would fetch a weight as it was before
the step. A state is a value that goes from segment to segment, and each write makes a new version of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from l2l_compile.ir.captured import Input
from l2l_compile.ir.graph import AT_READER, drop_dead, is_pure, memory_of, touches, writes, written_operands


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


def _written_inputs(graph: fx.Graph) -> set[int]:
    """The storages of the inputs that the graph writes into, without leaves that require a gradient."""
    untrained = [memory_of(p) for p in graph.find_nodes(op="placeholder") if not _is_trained(p)]
    inputs = {memory for memory in untrained if memory is not None}
    return inputs & {memory_of(operand) for node in graph.nodes for operand in written_operands(node)}


def _is_trained(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _make_at_readers(graph: fx.Graph, view: fx.Node) -> None:
    for reader in [user for user in view.users if user.op != "output"]:
        with graph.inserting_before(reader):
            own = graph.node_copy(view)
        own.meta[AT_READER] = True
        reader.replace_input_with(view, own)
