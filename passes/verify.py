"""The rules of the vocabulary: what makes a program legal. Checked after every pass; each rule has a name.

known_node        only nodes of the vocabulary, with a segment that exists
defined           a node reads only what stands before it
lane              restore reads the host, backward those gradients that it brings itself, everything else the device
weights           a segment runs on the weights that were fetched for it
form              an inner-looped segment reads its batched operands split, another one whole; only the former brings gradients
slabs             at most `prefetch` + 1 segments' weights are on the device at once
alive             nothing is read after it was released
released_once     every slab and every value of the device is released exactly once, or stashed
pushed_once       every segment that makes weight gradients pushes them exactly once
updated           in_forward, every segment with parameters to train is updated once before its fetch; in_backward,
                  every push is followed by one update that reads it; at_step, nothing is updated
stash             backward takes exactly what forward kept, where forward left it
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from ..errors import VerifyError
from ..ir import nodes
from .compilation import Compilation, Fact
from .streaming.place_stash import stash_inputs
from .streaming.release import holds_device_memory

_HOST_SOURCES = (nodes.offload,)


def verify(compilation: Compilation, facts: frozenset[Fact]) -> None:
    """Raise `VerifyError` with the rule and the node if a program graph is illegal, as far as the passes have come."""
    for graph in filter(None, (compilation.forward, compilation.backward)):
        verify_graph(graph, compilation, facts)
    if Fact.STASHES_PLACED in facts and compilation.backward is not None:
        _stash(compilation)


def verify_graph(graph: fx.Graph, compilation: Compilation, facts: frozenset[Fact]) -> None:
    """The rules that concern one graph."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        _known_node(node, compilation)
        _defined(node, position)
        if node.op == "call_function":
            _lane(node)
        if node.target in (nodes.forward, nodes.backward):
            _weights(node, compilation)
            _form(node, compilation)
    if Fact.PREFETCHED in facts or Fact.RELEASED in facts:
        _slabs(graph, compilation, position)
    if Fact.RELEASED in facts:
        _alive(graph)
        _released_once(graph)
    _pushed_once(graph, compilation)
    if Fact.UPDATES_PLACED in facts:
        _updated(graph, compilation)


def _known_node(node: fx.Node, compilation: Compilation) -> None:
    if node.op in ("placeholder", "output"):
        return
    if node.op != "call_function" or node.target not in nodes.VOCABULARY:
        raise VerifyError("known_node", node.name, f"is no node of the vocabulary ({node.target})")
    if node.target in (nodes.fetch_weights, nodes.forward, nodes.backward, nodes.push_gradients, nodes.update):
        if not 0 <= node.args[0] < len(compilation.segments):
            raise VerifyError("known_node", node.name, f"names segment {node.args[0]}, which does not exist")


def _defined(node: fx.Node, position: dict[fx.Node, int]) -> None:
    for read in node.all_input_nodes:
        if position[read] >= position[node]:
            raise VerifyError("defined", node.name, f"reads '{read.name}', which is made after it")


def _on_host(node: fx.Node) -> bool:
    return node.meta.get("host", False) or node.target in _HOST_SOURCES


def _lane(node: fx.Node) -> None:
    brought = _brought(node)
    for read in node.all_input_nodes:
        if (node.target is nodes.restore or read in brought) != _on_host(read):
            where, wanted = ("host", "device") if _on_host(read) else ("device", "host")
            raise VerifyError("lane", node.name, f"reads '{read.name}' on the {where}, where it needs the {wanted}")


def _brought(node: fx.Node) -> list[fx.Node]:
    """The gradients that a backward takes from the host, micro-batch by micro-batch."""
    return [node.args[3][i] for i in node.args[4]] if node.target is nodes.backward and len(node.args) > 4 else []


def _weights(node: fx.Node, compilation: Compilation) -> None:
    segment, weights = compilation.segments[node.args[0]], node.args[1]
    if not segment.weights:
        return
    if not isinstance(weights, fx.Node) or weights.target is not nodes.fetch_weights or weights.args[0] != segment.index:
        raise VerifyError("weights", node.name, f"runs '{segment.name}' without the weights fetched for it")


def _form(node: fx.Node, compilation: Compilation) -> None:
    segment = compilation.segments[node.args[0]]
    operands = [(a, s) for a, s in zip(node.args[2], segment.block.values, strict=True)]
    if node.target is nodes.backward:
        operands += [(a, s) for a, s in zip(node.args[3], segment.block.outputs, strict=True) if a is not None]
    for read, spec in operands:
        wanted = segment.block.inner_looped and spec.batch is not None
        if read in _brought(node):
            if not wanted or read.meta["split"]:
                raise VerifyError("form", node.name, f"brings '{read.name}' for '{segment.name}', which cannot be taken apart")
        elif read.meta["split"] != wanted:
            form = "split" if wanted else "whole"
            raise VerifyError("form", node.name, f"reads '{read.name}', which is not {form}, for '{segment.name}'")


def _slabs(graph: fx.Graph, compilation: Compilation, position: dict[fx.Node, int]) -> None:
    events = []
    for node in graph.find_nodes(op="call_function", target=nodes.fetch_weights):
        if node.users:  # a slab is free after its release; before releases are placed, after its last reader
            events += [(position[node], 1, node), (max(position[u] for u in node.users), -1, node)]
    held = 0
    for _, change, node in sorted(events, key=lambda e: e[:2]):
        held += change
        if held > compilation.options.prefetch + 1:
            raise VerifyError("slabs", node.name, f"needs slab {held} of {compilation.options.prefetch + 1}")


def _alive(graph: fx.Graph) -> None:
    released: set[fx.Node] = set()
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if read in released:
                raise VerifyError("alive", node.name, f"reads '{read.name}' after its release")
        if node.target is nodes.release:
            released.add(node.args[0])


def _released_once(graph: fx.Graph) -> None:
    count = Counter(n.args[0] for n in graph.nodes if n.target is nodes.release)
    for node in graph.nodes:
        if holds_device_memory(node):
            stashed = any(u.target is nodes.stash for u in node.users)
            if count[node] != (0 if stashed else 1):
                raise VerifyError("released_once", node.name, f"is released {count[node]} times")


def _pushed_once(graph: fx.Graph, compilation: Compilation) -> None:
    pushed = Counter(n.args[0] for n in graph.nodes if n.target is nodes.push_gradients)
    for node in graph.find_nodes(op="call_function", target=nodes.backward):
        segment = compilation.segments[node.args[0]]
        wanted = int(any(spec.differentiable for spec in segment.block.weights))
        if pushed.pop(segment.index, 0) != wanted:
            raise VerifyError("pushed_once", node.name, f"of '{segment.name}' does not push its gradients exactly once")
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == len(segment.values) and not wanted:
                raise VerifyError("pushed_once", user.name, "holds gradients of weights that want none")
    if pushed:
        raise VerifyError("pushed_once", "push_gradients", f"pushes gradients that no backward made: {sorted(pushed)}")


def _updated(graph: fx.Graph, compilation: Compilation) -> None:
    updates = graph.find_nodes(op="call_function", target=nodes.update)
    fits = {"in_forward": graph is compilation.forward, "in_backward": graph is compilation.backward}
    for node in updates:
        if not fits.get(compilation.options.update, False):
            raise VerifyError("updated", node.name, f"has no place in this graph with update={compilation.options.update!r}")
        after = nodes.fetch_weights if graph is compilation.forward else None
        partners = (
            [u for u in node.users if u.target is after]
            if after
            else [a for a in node.args[1:] if a.target is nodes.push_gradients]
        )
        if not partners or any(p.args[0] != node.args[0] for p in partners):
            raise VerifyError("updated", node.name, "does not stand between the gradients and the next fetch of its segment")
    counted = Counter(n.args[0] for n in updates)
    for node in graph.nodes:
        if fits["in_forward"] and compilation.options.update == "in_forward" and node.target is nodes.fetch_weights:
            wanted = any(spec.differentiable for spec in compilation.segments[node.args[0]].block.weights)
        else:
            wanted = fits["in_backward"] and compilation.options.update == "in_backward" and node.target is nodes.push_gradients
        if wanted and counted[node.args[0]] != 1:
            raise VerifyError(
                "updated", node.name, f"of '{compilation.segments[node.args[0]].name}' goes with {counted[node.args[0]]} updates"
            )


def _stash(compilation: Compilation) -> None:
    kept = compilation.forward.output_node().args[0][1]
    taken = stash_inputs(compilation.backward)
    if len(kept) != len(taken):
        raise VerifyError("stash", "output", f"keeps {len(kept)} values, backward takes {len(taken)}")
    for left, right in zip(kept, taken, strict=True):
        if left.meta["value"] != right.meta["value"]:
            raise VerifyError("stash", right.name, f"takes the place of '{left.meta['value']}' in what forward keeps")
        on_host = left.op == "placeholder" or left.target is nodes.offload
        if on_host != right.meta["host"] and not (left.target is nodes.stash and not right.users):
            raise VerifyError("stash", right.name, f"is not where forward left '{left.name}'")
