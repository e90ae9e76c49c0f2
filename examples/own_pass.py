"""A pass of your own: weights are fetched two layers ahead in the first half of a program, one layer ahead in the second.

The option `prefetch` holds for the whole program; the device has `prefetch` + 1 weight slabs. The pass `FetchLater` moves the
fetches of the second half to one layer before the layer that reads them. Programs are verified after every pass: `FetchEarlier`
moves fetches to places where no slab is free, and is refused with the rule that it breaks.

    python examples/own_pass.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

import l2l_compile
from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation, Fact, Pass


@dataclass(frozen=True)
class FetchLater(Pass):
    """In the second half of each graph, weights are fetched `ahead` segments before the segment that reads them."""

    name: ClassVar[str] = "fetch_later"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    ahead: int = 1

    def apply(self, compilation: Compilation) -> None:
        for graph in filter(None, (compilation.forward, compilation.backward)):
            order, runs = {node: i for i, node in enumerate(graph.nodes)}, segment_runs(graph)
            for index in range(len(runs) // 2, len(runs)):
                fetch, place = nodes.operands(runs[index]).weights, runs[index - self.ahead]
                if isinstance(fetch, fx.Node) and order[fetch] < order[place]:
                    place.prepend(fetch)


@dataclass(frozen=True)
class FetchEarlier(Pass):
    """All weights are fetched at the beginning. The device has too few slabs for that."""

    name: ClassVar[str] = "fetch_earlier"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})

    def apply(self, compilation: Compilation) -> None:
        first = segment_runs(compilation.forward)[0]
        for fetch in compilation.forward.find_nodes(op="call_function", target=nodes.fetch_weights):
            first.prepend(fetch)


def segment_runs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that run a segment, in order."""
    return [node for node in graph.nodes if nodes.runs_segment(node)]


class Layer(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(8))), torch.randn(4, 32)
    options = {"micro_batches": 2, "device": "cpu", "block_compiler": "eager", "prefetch": 2}
    compiled = torch.compile(model, backend="l2l", options={**options, "passes": [FetchLater()]})
    compiled(x).sum().backward()
    print(l2l_compile.programs(compiled)[0])
    try:
        l2l_compile.explain(model, {**options, "passes": [FetchEarlier()]})(x)
    except l2l_compile.VerifyError as error:
        print(f"\nFetchEarlier is refused: {error}")


if __name__ == "__main__":
    main()
