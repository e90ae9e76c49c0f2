"""FLOPs of operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from l2l_compile.lowering.costs import cost_of

aten = torch.ops.aten
ROWS, HEADS, GROUPS, PLACES, WIDTH = 2, 8, 2, 16, 32
FORWARD = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def attention(name):
    return getattr(aten, f"_scaled_dot_product_{name}").default


@pytest.mark.parametrize("name", FORWARD)
def test_grouped_attention_costs_as_many_flops_as_all_heads(name):
    """Formulas of PyTorch 2.11 refuse fewer heads of keys than of queries."""
    query = torch.empty(ROWS, HEADS, PLACES, WIDTH, device="meta")
    key = torch.empty(ROWS, GROUPS, PLACES, WIDTH, device="meta")
    found = cost_of(attention(name), (query, key, key), {}, query).flops
    assert found == sdpa_flop_count(query.shape, query.shape, query.shape)
    found = cost_of(attention(f"{name}_backward"), (query, query, key, key), {}, query).flops
    assert found == sdpa_backward_flop_count(*[query.shape] * 4)
