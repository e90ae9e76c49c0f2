"""Casts that are taken out of an ATen graph change none of its bits, and no result comes to share memory with an operand."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from l2l_compile.lowering.widening import cancel_round_trips, keep_results_narrow

CAST = torch.ops.aten._to_copy.default
BF16, FP32 = torch.bfloat16, torch.float32


def traced(function, *dtypes):
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(4, 6, dtype=d) for d in dtypes))


def casts(module) -> int:
    return len(module.graph.find_nodes(op="call_function", target=CAST))


FUNCTIONS = {
    "at once": (lambda w: w.to(FP32).to(BF16) * 2, 0),
    "behind views": (lambda w: w.to(FP32).view(3, 8).t().unsqueeze(0).to(BF16) * 2, 0),
    "behind a copy": (lambda w: w.to(FP32).t().reshape(3, 8).to(BF16) * 2, 2),
    "read in both": (lambda w: (lambda wide: wide.sum() + (wide.t().to(BF16) * 2).sum())(w.to(FP32)), 1),
    "behind arithmetic": (lambda w: (w.to(FP32) + 1e-3).to(BF16), 2),
    "to another 16 bits": (lambda w: w.to(FP32).to(torch.float16) * 2, 2),
    "behind an expanded view": (lambda w: w.to(FP32).unsqueeze(0).expand(2, 4, 6).to(BF16).view(8, 6) * 2, 2),
    "returned": (lambda w: w.to(FP32).to(BF16), 2),
    "returned as a view": (lambda w: w.to(FP32).to(BF16).view(-1), 2),
    "written": (lambda w: w.to(FP32).to(BF16).mul_(2) + 1, 2),
    "written wide": (lambda w: w.to(FP32).mul_(1.01).to(BF16) * 2, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_round_trips(name):
    function, left = FUNCTIONS[name]
    module = traced(function, BF16)
    cancel_round_trips(module)
    module.graph.lint()
    assert casts(module) == left
    w = torch.randn(4, 6).to(BF16)
    kept = w.clone()
    made = module(w)
    assert torch.equal(made, function(w)) and torch.equal(w, kept)
    assert made.untyped_storage()._cdata != w.untyped_storage()._cdata


GRADIENTS = {
    "wide at the end": lambda a, b: ((a.t() @ b).to(FP32), (a.t() @ b).t().to(FP32).contiguous()),
    "a sum": lambda a, b: ((a * b).to(FP32) + (a + b).to(FP32), (a * b).to(FP32)),
    "one value twice": lambda a, b: (lambda m: (m.to(FP32), m.to(FP32)))(a * b),
    "an operand": lambda a, b: (a.to(FP32), b.to(FP32).t().contiguous()),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_results_in_16_bits(name):
    function = GRADIENTS[name]
    module = traced(function, BF16, BF16)
    keep_results_narrow(module, [0, 1])
    module.graph.lint()
    a, b = torch.randn(4, 6).to(BF16), torch.randn(4, 6).to(BF16)
    made, expected = module(a, b), function(a, b)
    assert [m.dtype for m in made] == [FP32 if name == "a sum" else BF16, BF16]
    for found, wide in zip(made, expected, strict=True):
        assert torch.equal(found.to(FP32), wide) and found.is_contiguous()
    assert len({t.untyped_storage()._cdata for t in (*made, a, b)}) == 4
