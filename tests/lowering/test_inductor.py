"""How blocks are handed to Inductor."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from models import Stack, compiled, rows


def test_results_outlive_a_call_and_examples_take_no_memory(monkeypatch):
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


class Caching(torch.nn.Module):
    """Keys of two heads behind those of an empty cache: PyTorch's kernel lays them out in order, Inductor as they came."""

    def __init__(self):
        super().__init__()
        self.keys = torch.nn.Linear(8, 8)

    def forward(self, x):
        keys = torch.cat([torch.tensor([]), self.keys(x).unflatten(-1, (2, 4)).transpose(1, 2)], dim=-2)
        return torch.softmax(keys @ (keys * 0.5).transpose(-2, -1), -1).pow(2).mean()


def test_a_view_of_what_inductor_lays_out_otherwise_is_copied():
    torch.manual_seed(0)
    model, x = Caching(), torch.randn(4, 3, 8)
    expected = model(x)
    found = torch.compile(model, backend="l2l", options={"micro_batches": 2, "device": "cpu"})(x)
    found.backward()
    torch.testing.assert_close(found, expected)
