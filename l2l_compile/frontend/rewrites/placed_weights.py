"""Finds which rank of a pipeline has each parameter and buffer that a graph reads."""

from __future__ import annotations

import torch
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.placement import STAND_IN, Placed, anything_is_placed, placed, places_in


def find_owners(graph: fx.Graph) -> tuple[dict[fx.Node, Placed], PipelineRanks | None]:
    """Where each input that one rank alone has is, and the ranks; None if no input is placed.

    Raises `L2LError` for a parameter to train that no rank has, and for inputs of two pipelines.
    """
    if not anything_is_placed():
        return {}, None
    local, of_modules = adapter.modules_in_frame()
    places = places_in([*local, *of_modules])
    found: dict[fx.Node, Placed] = {}
    others: list[fx.Node] = []
    for node in graph.find_nodes(op="placeholder"):
        value = adapter.value_of(node)
        if (where := places.get(id(value)) or placed(value)) is not None:
            found[node] = where
        elif STAND_IN in adapter.source_name(node):
            raise L2LError(
                f"'{adapter.source_name(node).replace(STAND_IN, '')}' is on another rank of a pipeline, and the function that reads it does not "
                "get the model as an argument: compile the model, or a method of it"
            )
        elif isinstance(example := node.meta.get("example_value"), torch.nn.Parameter) and example.requires_grad:
            others.append(node)
    if not found:
        return {}, None
    ranks = next(iter(found.values())).ranks
    for node, where in found.items():
        if where.ranks is not ranks:
            raise L2LError(
                f"parameter '{adapter.source_name(node)}' is of another pipeline than those before it: compile them apart"
            )
    if others:
        raise L2LError(
            f"parameter '{adapter.source_name(others[0])}' is on no rank of the pipeline, but others are: add all layers before "
            "l2l_compile.pipeline, and read parameters as attributes of their modules"
        )
    return found, ranks
