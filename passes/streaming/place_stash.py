"""Decide where values wait that are not needed for a while: on the device, or offloaded to the host.

    %x = ...                       %x = ...
    stash(%x)              =>      %h = offload(%x)          and in backward     %x = restore(%h)

With `stash="host"`, a value whose next reader is more than `prefetch + 1` segments away goes to the host, whether the
reader is in backward (the input of a layer) or later in the same graph (a skip connection, an attention mask between
encoder and decoder). A value that every layer reads is never idle for that long and stays. With `stash="device"`,
everything stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...ir import nodes
from ..compilation import Compilation, Fact

_TENSORS = ("spec", "split", "value")


@dataclass(frozen=True)
class PlaceStash:
    """Provides `stashes_placed`."""

    name: ClassVar = "place_stash"
    requires: ClassVar = frozenset({Fact.PROGRAM})
    provides: ClassVar = frozenset({Fact.STASHES_PLACED})

    def apply(self, compilation: Compilation) -> None:
        idle = compilation.options.prefetch + 1
        host = compilation.options.stash == "host"
        forward, backward = compilation.forward, compilation.backward
        if host:
            for graph in filter(None, (forward, backward)):
                _bridge(graph, idle)
        for index, node in enumerate(forward.output_node().args[0][1]):
            if node.target is not nodes.stash:
                continue  # an input of the program: it is on the host as it is
            source = node.args[0]
            offloaded = next((u for u in source.users if u.target is nodes.offload), None)
            if offloaded is not None:
                node.replace_all_uses_with(offloaded)
                forward.erase_node(node)
            elif host and _idle_until_backward(compilation, index) > idle:
                node.target = nodes.offload
                source.append(node)  # the copy starts as soon as the value is there
            elif backward is not None:
                _keep_on_device(backward, index)


def segment_times(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node, how many segments have run before it."""
    times, time = {}, 0
    for node in graph.nodes:
        times[node] = time
        time += node.target in (nodes.forward, nodes.backward)
    return times


def _idle_until_backward(compilation: Compilation, index: int) -> int:
    """Segments between the last reader of a kept value in forward and its first reader in backward."""
    value = compilation.gradients.kept[index]
    last = max(s.index for s in compilation.segments if value in s.values)
    return 2 * (len(compilation.segments) - 1 - last)


def stash_inputs(backward: fx.Graph) -> list[fx.Node]:
    """The placeholders of the backward graph that take the stashes, in the order of forward's output."""
    return [n for n in backward.find_nodes(op="placeholder") if n.meta["kind"] == "stash"]


def _keep_on_device(backward: fx.Graph, index: int) -> None:
    placeholder = stash_inputs(backward)[index]
    placeholder.meta["host"] = False
    for restored in list(placeholder.users):
        restored.replace_all_uses_with(placeholder)
        backward.erase_node(restored)


def _bridge(graph: fx.Graph, idle: int) -> None:
    """Send values to the host that wait for more than `idle` segments within one graph."""
    times = segment_times(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or "spec" not in node.meta
            or node.target in (nodes.offload, nodes.stash)
            or node.meta.get("host")
        ):
            continue
        readers = sorted((u for u in node.users if u.target not in (nodes.stash, nodes.offload)), key=order.__getitem__)
        moments = [times[node], *(times[r] for r in readers)]
        for k in range(len(readers)):
            if moments[k + 1] - moments[k] > idle:
                _restore_before(graph, node, readers[k], readers[k:], order)
                break


def _restore_before(graph: fx.Graph, node: fx.Node, at: fx.Node, readers: list[fx.Node], order: dict) -> None:
    if node.target is nodes.restore:
        source = node.args[0]  # it came from the host, where it still is
    else:
        with graph.inserting_after(node):
            source = _like(graph.call_function(nodes.offload, (node,)), node)
            order[source] = order[node] + 0.5
    with graph.inserting_before(at):
        back = _like(graph.call_function(nodes.restore, (source,)), node)
        order[back] = order[at] - 0.5
    for reader in readers:
        reader.replace_input_with(node, back)


def _like(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta.update({key: old.meta[key] for key in _TENSORS}, segment=None)
    return new
