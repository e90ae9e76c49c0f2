"""Indices that Inductor knows from positions: those of T5's bias, which is padded for attention."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from l2l_compile.lowering.inductor import compile_graph


def bias(table: torch.Tensor) -> tuple[torch.Tensor]:
    """T5's, of a decoder and of short distances."""
    places = torch.arange(12, device=table.device)
    zeros = torch.zeros(12, 12, dtype=torch.int64, device=table.device)
    distances = -torch.minimum(places[None] - places[:, None], zeros)
    return (torch.nn.functional.pad(torch.nn.functional.embedding(distances, table).permute(2, 0, 1), (0, 4)),)


def test_a_padded_bias_of_positions_compiles(runtime):
    device = torch.device("cuda")
    graph = make_fx(bias, tracing_mode="fake")(torch.zeros(32, 4, device=device))
    (found,) = compile_graph(graph, device)(torch.zeros(32, 4, device=device))
    assert found.shape == (4, 12, 16)
