"""Modules around graphs whose Python code is written where somebody reads or runs it. The executor and the tracer interpret graphs."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(graph: fx.Graph, root: nn.Module | None = None) -> fx.GraphModule:
    """A module around `graph`, with the attributes of `root` that it reads."""
    return _LazyGraphModule({} if root is None else root, graph)
