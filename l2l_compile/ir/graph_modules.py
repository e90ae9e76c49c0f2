"""Modules around graphs. Their Python code is generated only when it is read or run: executor and tracer interpret graphs."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(graph: fx.Graph, root: nn.Module | None = None) -> fx.GraphModule:
    """A module around `graph`, with the attributes of `root` that it reads."""
    return _LazyGraphModule({} if root is None else root, graph)
