"""Free every weight slab and every value of the device right after its last reader.

A value that forward stashes on the device is not released there: backward releases it.
"""
from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from ..ir import nodes
from .compilation import Compilation

_NO_MEMORY = (nodes.forward, nodes.backward, nodes.offload, nodes.stash, nodes.push_gradients, nodes.update, nodes.write_back, nodes.release)


@dataclass(frozen=True)
class Release:
    """Provides `released`."""

    name: str = "release"
    requires: frozenset[str] = frozenset({"prefetched"})
    provides: frozenset[str] = frozenset({"released"})

    def apply(self, compilation: Compilation) -> None:
        for graph in filter(None, (compilation.forward, compilation.backward)):
            _release_all(graph)


def holds_device_memory(node: fx.Node) -> bool:
    """Whether a node stands for memory of the device that must be released."""
    if node.meta.get("host", False):
        return False
    if node.op == "placeholder":
        return True
    return node.op == "call_function" and node.target not in _NO_MEMORY


def _release_all(graph: fx.Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not holds_device_memory(node) or any(u.target is nodes.stash for u in node.users):
            continue
        last = max(node.users, key=order.__getitem__, default=node)
        last = _after_results(last, order)
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        with graph.inserting_after(last):
            graph.call_function(nodes.release, (node,)).meta["segment"] = None


def _after_results(node: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """Releases stand behind the picks of a segment's results, so that a result that nobody reads is there to free."""
    if node.target in (nodes.forward, nodes.backward):
        return max((u for u in node.users if u.target is operator.getitem), key=order.__getitem__, default=node)
    return node
