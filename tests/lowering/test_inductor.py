"""How blocks are handed to Inductor."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from models import Stack, compiled, rows


def test_results_outlive_the_next_call_and_examples_take_no_memory(monkeypatch):
    """The user may have CUDA graphs on, whose next replay overwrites results; on a GPU, real examples would be allocated."""
    compile_, seen = torch._inductor.compile, []

    def noted(module, examples, options=None):
        with torch._inductor.config.patch(options):
            seen.append((torch._inductor.config.triton.cudagraphs, [e for e in examples if isinstance(e, torch.Tensor)]))
        return compile_(module, examples, options)

    monkeypatch.setattr(torch._inductor, "compile", noted)
    x = rows(6)
    with torch._inductor.config.patch({"triton.cudagraphs": True, "triton.cudagraph_trees": True}):
        compiled(Stack(2).double(), block_compiler="inductor")(x).sum().backward()
    assert seen and all(not on for on, _ in seen)
    assert all(examples and all(isinstance(e, FakeTensor) for e in examples) for _, examples in seen)
