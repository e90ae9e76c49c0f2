"""Decide where a value waits until its next reader: on the device, on the host, or on the disk.

    %x = ...                       %x = ...
    stash(%x)              =>      %h = offload(%x)          and in backward     %x = restore(%h)

With `stash="host"`, a value whose next reader is more than `prefetch + 1` segments away goes to the host, whether the
reader is in backward (the input of a layer) or later in the same graph (a skip connection, an attention mask between
encoder and decoder). A value that every layer reads is never idle for that long and stays. With `stash="device"`,
everything stays. With `stash="disk"`, what would wait on the host for backward goes on to the disk, unless the host reads it too:

    %h = offload(%x)                    and in backward     %h = load(%s)
    %s = store(%h)                                          %x = restore(%h)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation, Fact

_TENSORS = ("spec", "split", "value")
_KEEP = (nodes.stash, nodes.offload, *nodes.KEEPS)  # readers for which a value does not have to wait


@dataclass(frozen=True)
class PlaceStash:
    """Provides `stashes_placed`."""

    name: ClassVar[str] = "place_stash"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PROGRAM, Fact.ACTIVATIONS_KEPT, Fact.WEIGHTS_KEPT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.STASHES_PLACED})

    def apply(self, compilation: Compilation) -> None:
        idle = compilation.options.prefetch + 1
        host = compilation.options.stash != "device"
        disk = compilation.options.stash == "disk"
        forward, backward = compilation.forward, compilation.backward
        if host:
            for graph in filter(None, (forward, backward)):
                _bridge(graph, idle)
        waits = _segments_until_backward(forward)
        for index, node in enumerate(nodes.returned(forward).stashes):
            if node.target is not nodes.stash:
                continue  # an input of the program, which is on the host already
            source = nodes.operands(node).x
            offloaded = next((u for u in source.users if u.target is nodes.offload), None)
            if offloaded is not None:
                node.replace_all_uses_with(offloaded)
                forward.erase_node(node)
            elif host and waits[node.meta["value"]] > idle:
                node.target = nodes.offload
                source.append(node)  # the copy starts as soon as the value exists
                if disk and backward is not None:
                    _to_disk(forward, node, stash_inputs(backward)[index])
            elif backward is not None:
                _keep_on_device(backward, index)


def segment_times(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node, how many segments have run before it."""
    times, time = {}, 0
    for node in graph.nodes:
        times[node] = time
        time += nodes.runs_segment(node)
    return times


def _segments_until_backward(forward: fx.Graph) -> dict[str, int]:
    """By name of a value, the number of segments that run between its last reader in forward and its first in backward."""
    times = segment_times(forward)
    last = times[forward.output_node()] - 1
    waits: dict[str, int] = {}
    for node in forward.nodes:
        if "value" in node.meta:
            for reader in filter(nodes.runs_segment, node.users):
                waits[node.meta["value"]] = min(2 * (last - times[reader]), waits.get(node.meta["value"], 2 * last))
    return waits


def stash_inputs(backward: fx.Graph) -> list[fx.Node]:
    """The placeholders of the backward graph that take what forward keeps, in the order of forward's output."""
    return [n for n in backward.find_nodes(op="placeholder") if n.meta["kind"] in ("stash", *nodes.KEPT_OF_SEGMENT)]


def _to_disk(forward: fx.Graph, offloaded: fx.Node, taken: fx.Node) -> None:
    """Store what forward offloads, and load it before each reader of `taken`, its placeholder in backward."""
    with forward.inserting_after(offloaded):
        stored = _like(forward.call_function(nodes.store, (offloaded,)), offloaded)
    offloaded.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    taken.meta.update(host=False, disk=True)
    for restored in list(taken.users):
        with restored.graph.inserting_before(restored):
            loaded = _like(restored.graph.call_function(nodes.load, (taken,)), taken)
        restored.replace_input_with(taken, loaded)


def _keep_on_device(backward: fx.Graph, index: int) -> None:
    placeholder = stash_inputs(backward)[index]
    placeholder.meta["host"] = False
    for restored in list(placeholder.users):
        restored.replace_all_uses_with(placeholder)
        backward.erase_node(restored)


def _bridge(graph: fx.Graph, idle: int) -> None:
    """Offload each value that waits for more than `idle` segments within one graph, and restore it before its next reader."""
    times = segment_times(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if _waits_on_device(node)]:
        readers = sorted((u for u in node.users if u.target not in _KEEP), key=order.__getitem__)
        moments = [times[node], *(times[r] for r in readers)]
        late = next((k for k, (before, then) in enumerate(itertools.pairwise(moments)) if then - before > idle), None)
        if late is not None:
            _restore_before(graph, node, readers[late], readers[late:], order)


def _waits_on_device(node: fx.Node) -> bool:
    """Whether a node makes a value on the device, which may have to wait there for its readers."""
    return node.op == "call_function" and "spec" in node.meta and nodes.holds_device_memory(node)


def _restore_before(graph: fx.Graph, node: fx.Node, at: fx.Node, readers: list[fx.Node], order: dict) -> None:
    if node.target is nodes.restore:
        source = nodes.operands(node).x  # it came from the host, where it still is
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
