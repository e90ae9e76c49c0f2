"""Rewrites layers of `ColwiseParallel` and `RowwiseParallel` (`parallelize_module`): this rank's part, as plain operations.

    %y = from_local(%x, %mesh, (R,))                              %y = sum_gradients(%x, group)
    %z = linear(%y, %w, %b)              w: Shard(0)              %z = linear(%y, %w, %b)
    %o = redistribute(%z, (S(-1),))                        =>
    %l = to_local(%o)

    %y = from_local(%x, %mesh, (S(-1),))
    %z = linear(%y, %w, %b)              w: Shard(1)              %z = linear(%x, %w)
    %o = redistribute(%z, (R,))                                   %o = sum_over(%z, group)
    %l = to_local(%o)                                             %l = %o + %b

Afterwards, a parameter stands for this rank's part of it. No value is a DTensor any more, and the name of the process group
stands in the place of the mesh. Sibling modules that read the same %x (the projections of queries, keys and values) share one
`sum_gradients`: their gradients are added up, and then summed over ranks once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from l2l_compile.errors import L2LError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.frontend.rewrites.sharded_weights import TP_PARAMETER, method_of
from l2l_compile.ranks.sharded import is_of_a_parallel_layer, is_sharded, local
from l2l_compile.ranks.tensor_parallel import sum_gradients, sum_over

REPLICATED, COLUMNS, PARTIAL = "the same on all ranks", "columns of it", "a part of a sum"


@dataclass(frozen=True)
class _Local:
    """This rank's part of a DTensor of the graph. `bias` has to be added after the parts are summed over ranks."""

    node: fx.Node
    placement: str
    bias: fx.Node | None = None


def make_local(graph: fx.Graph) -> tuple[str, DeviceMesh | None]:
    """Take the DTensors of parallel layers out of a graph. Returns the first of their parameters, in words, and its mesh.

    Returns "" and None if there are no such layers.

    Raises `L2LError` for any other way to make a layer parallel.
    """
    for node in graph.find_nodes(op="placeholder"):
        if (parameter := _parallel(node)) is not None:
            first = _in_words(node, parameter)
            _Layers(graph).rewrite()
            return first, parameter.device_mesh
    return "", None


def _in_words(placeholder: fx.Node, parameter: DTensor) -> str:
    return f"parameter '{adapter.source_name(placeholder)}' is a DTensor with {parameter.placements} on {parameter.device_mesh}"


def _parallel(placeholder: fx.Node) -> DTensor | None:
    """The DTensor parameter of a parallel layer that an input is, or that it is a part of; None if there is none."""
    example = placeholder.meta.get("example_value")
    return example if is_of_a_parallel_layer(example) else placeholder.meta.get(TP_PARAMETER)


class _Layers:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.found: dict[fx.Node, _Local] = {}
        self.parameters: dict[fx.Node, DTensor] = {}
        self.entered: dict[tuple[fx.Node, str, tuple[str, ...]], fx.Node] = {}

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            example = node.meta.get("example_value")
            if node.op == "placeholder":
                if (parameter := _parallel(node)) is not None:
                    self._parameter(node, parameter)
            elif node.op != "output":
                self._operation(node, example)
        for node in reversed(list(self.found)):
            if not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:
            if is_sharded(node.meta.get("example_value")) and node not in self.parameters and node.op != "placeholder":
                raise self._refused(node)

    def _parameter(self, node: fx.Node, example: DTensor) -> None:
        self.parameters[node] = example
        if example.device_mesh.ndim > 1:
            raise self._refused(node, "its mesh has several dimensions, which l2l_compile.shard has not seen")
        sizes = example.shape[dim] if (dim := getattr(example.placements[0], "dim", None)) is not None else 0
        if sizes % example.device_mesh.size():
            raise self._refused(node, f"its {sizes} rows or columns are not a multiple of the ranks")
        if is_sharded(node.meta["example_value"]):
            node.meta["example_value"] = torch.nn.Parameter(local(example).detach(), example.requires_grad)

    def _operation(self, node: fx.Node, example: object) -> None:
        reads = [n for n in node.all_input_nodes if n in self.found or n in self.parameters]
        name = method_of(node)
        if name == "from_local" and is_sharded(example):
            self._enter(node, example)
        elif name == "linear" and reads:
            self._linear(node, example)
        elif name == "redistribute" and reads:
            self._redistribute(node, self._value(node), example)
        elif name == "to_local" and reads:
            found = self._value(node)
            if found.placement == PARTIAL:
                raise self._refused(node)
            node.replace_all_uses_with(found.node)
            self.found[node] = found
        elif reads:
            raise self._refused(node)

    def _value(self, reader: fx.Node) -> _Local:
        """This rank's part of the DTensor whose method a node calls."""
        value = reader.args[0]
        if value not in self.found:
            raise self._refused(reader)
        return self.found[value]  # type: ignore[index]

    def _enter(self, node: fx.Node, example: DTensor) -> None:
        given = node.args[0]
        assert isinstance(given, fx.Node)
        placement = _placement(example)
        if placement == REPLICATED:
            given = self._summed(given, node, example)
        elif placement != COLUMNS:
            raise self._refused(node)
        self.found[node] = _Local(given, placement)

    def _summed(self, given: fx.Node, node: fx.Node, example: DTensor) -> fx.Node:
        """`given` after a `sum_gradients`, which all modules of one parent that read `given` share."""
        *parents, _ = node.meta.get("nn_module_stack") or ("",)
        key = given, _group(example), tuple(parents)
        if not parents or key not in self.entered:
            with self.graph.inserting_before(node):
                self.entered[key] = self._like(self.graph.call_function(sum_gradients, (given, _group(example))), node, example)
        return self.entered[key]

    def _linear(self, node: fx.Node, example: object) -> None:
        operands: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
        x, weight, bias = operands["input"], operands["weight"], operands.get("bias")
        given, split = self.found.get(x), self._split(weight)
        assert isinstance(example, DTensor) and callable(node.target)
        with self.graph.inserting_before(node):
            if given is not None and given.placement == REPLICATED and split == 0 and (bias is None or self._split(bias) == 0):
                made = self.graph.call_function(node.target, (given.node, weight, bias))
                self.found[node] = _Local(self._like(made, node, example), COLUMNS)
            elif given is not None and given.placement == COLUMNS and split == 1 and (bias is None or self._is_whole(bias)):
                made = self.graph.call_function(node.target, (given.node, weight))
                self.found[node] = _Local(self._like(made, node, example), PARTIAL, bias)
            else:
                raise self._refused(node)

    def _split(self, parameter: fx.Node) -> int | None:
        """The dimension in which a parameter is split; None if it is whole, or not of a parallel layer."""
        return getattr(self.parameters[parameter].placements[0], "dim", None) if parameter in self.parameters else None

    def _is_whole(self, parameter: fx.Node) -> bool:
        return parameter in self.parameters and self.parameters[parameter].placements[0].is_replicate()

    def _redistribute(self, node: fx.Node, found: _Local, example: object) -> None:
        assert isinstance(example, DTensor)
        if found.placement == PARTIAL and _placement(example) == REPLICATED:
            with self.graph.inserting_before(node):
                made = self._like(self.graph.call_function(sum_over, (found.node, _group(example))), node, example)
                if found.bias is not None:
                    made = self._like(self.graph.call_function(operator.add, (made, found.bias)), node, example)
            found = _Local(made, REPLICATED)
        elif _placement(example) != found.placement:
            raise self._refused(node)
        self.found[node] = replace(found, bias=None)

    def _like(self, new: fx.Node, old: fx.Node, example: DTensor) -> fx.Node:
        new.meta = dict(old.meta)
        here = local(example).detach()
        new.meta["example_value"] = here.requires_grad_(example.requires_grad)
        return new

    def _refused(self, node: fx.Node, why: str = "") -> L2LError:
        parameter, example = self._nearest(node)
        return L2LError(
            f"{_in_words(parameter, example)}, and "
            + (why or f"'{node.name}' uses it in another way than the linear layers of ColwiseParallel() and RowwiseParallel()")
            + ". Backend 'l2l' runs these two styles, with the layouts that they have without arguments: leave other modules out of "
            "parallelize_module"
        )

    def _nearest(self, node: fx.Node) -> tuple[fx.Node, DTensor]:
        """The parameter that is nearest to a node in the graph, over its operands and its readers."""
        queue, seen = [node], {node}
        while queue:
            now = queue.pop(0)
            for near in (now, *now.all_input_nodes):
                if near in self.parameters:
                    return near, self.parameters[near]
            after = [n for n in (*now.users, *now.all_input_nodes) if n not in seen]
            seen.update(after)
            queue += after
        return next(iter(self.parameters.items()))


def _placement(tensor: DTensor) -> str:
    """The placement of a DTensor of a layer; "" for a placement that is not supported."""
    placement = tensor.placements[0] if len(tensor.placements) == 1 else None
    if placement is None:
        return ""
    if placement.is_replicate():
        return REPLICATED
    if placement.is_partial():
        return PARTIAL if placement.is_partial("sum") else ""
    return COLUMNS if placement.is_shard(tensor.ndim - 1) or placement.is_shard(-1) else ""


def _group(tensor: DTensor) -> str:
    return tensor.device_mesh.get_group().group_name
