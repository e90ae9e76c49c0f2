"""Removes from the graph the calls that make a sharded parameter whole.

    %w = placeholder            (DTensor)
    %r = redistribute(%w)                        =>      %w = placeholder            (the whole)
    %x = to_local(%r)
         linear(..., %x)                                      linear(..., %w)

A program gathers a layer's weights itself, before it runs the layer (`passes/streaming/place_ranks.py`). A weight that several
modules share is one input.
"""

from __future__ import annotations

import torch
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.ranks.placement import STAND_IN
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.ranks.sharded import is_of_a_parallel_layer, is_sharded, is_sharded_twice, local, ranks_behind, shard_spec_of

# In the meta of an input that is a rank's part of a parallel layer's parameter: the DTensor of that layer.
TP_PARAMETER = "tp_parameter"


def make_whole(graph: fx.Graph) -> tuple[dict[fx.Node, ShardSpec], Ranks | None]:
    """Take the calls out. Returns how each sharded input is sharded, and the ranks; None if no input is sharded.

    Raises `L2LError` for a parameter that is sharded or read in another way, or is sharded over other ranks than the rest.
    """
    sharded: dict[fx.Node, ShardSpec] = {}
    ranks: Ranks | None = None
    for placeholder in graph.find_nodes(op="placeholder"):
        example = placeholder.meta.get("example_value")
        if not is_sharded(example) or is_of_a_parallel_layer(example):
            continue
        behind = ranks_behind(example)
        if ranks is not None and behind is not ranks:
            raise L2LError(f"parameter '{_name(placeholder)}' is sharded over other ranks than those before it: use one mesh")
        ranks, sharded[placeholder] = behind, shard_spec_of(example)
        _peel(graph, placeholder)
    if ranks is not None:
        _refuse_whole_parameters(graph, sharded)
    return sharded, ranks


_CHAIN = ("redistribute", "to_local")
_CHAIN_OF_PART = ("to_local", "from_local", "redistribute", "to_local", "from_local")  # `sharded._whole_part`


def _peel(graph: fx.Graph, placeholder: fx.Node) -> None:
    """Replace the gathered parameter by its placeholder, which from here on stands for the whole parameter.

    If the parameter is of a parallel layer as well, the placeholder stands for this rank's part of that layer's parameter.
    """
    example = placeholder.meta["example_value"]
    chain = _CHAIN_OF_PART if is_sharded_twice(example) else _CHAIN
    made = [placeholder]
    for method in chain:
        readers = [reader for node in made for reader in node.users]
        for reader in readers:
            if method_of(reader) != method:
                raise _read_otherwise(placeholder, reader)
        made = readers
    whole = example.to_local().new_empty(shard_spec_of(example).shape)  # used if the parameter has no reader
    for node in made:
        whole = node.meta["example_value"]
        if is_sharded(whole):
            placeholder.meta[TP_PARAMETER], whole = whole, local(whole)
    for node in made:
        node.replace_all_uses_with(placeholder)
        while node is not placeholder and not node.users:
            node, before = node.all_input_nodes[0], node
            graph.erase_node(before)
    placeholder.meta["example_value"] = torch.nn.Parameter(whole.detach(), example.requires_grad)


def method_of(node: fx.Node) -> str:
    """The name of the DTensor method that a node calls. Dynamo of 2.11 records a function of its own instead of the method."""
    target = getattr(node.target, "__name__", node.target)
    return target.removeprefix("prim_").removeprefix("prim ") if isinstance(target, str) else ""


def _read_otherwise(placeholder: fx.Node, reader: fx.Node) -> L2LError:
    return L2LError(
        f"parameter '{_name(placeholder)}' is sharded over ranks, and '{reader.name}' reads it by another way than as an attribute "
        "of its module (`module.weight`), which makes it whole: read it there"
    )


def _refuse_whole_parameters(graph: fx.Graph, sharded: dict[fx.Node, ShardSpec]) -> None:
    """Raise for a trained parameter that is not sharded: its gradients would differ among the ranks."""
    for node in graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        is_whole = isinstance(example, torch.nn.Parameter) and example.requires_grad and node not in sharded
        if is_whole and STAND_IN not in _name(node):  # another stage of the pipeline has the parameter
            raise L2LError(
                f"parameter '{_name(node)}' is not sharded over ranks, but others are: add all layers before l2l_compile.shard"
            )


def _name(placeholder: fx.Node) -> str:
    return adapter.source_name(placeholder)
