"""The device memory that the dry run counts is what a step asks PyTorch's own allocator for."""

from __future__ import annotations

import pytest
import torch

import l2l_compile
import models
from training_loop import UPDATES
from zoo import MODELS

WAYS = [
    ("at_step", "device", "bf16"),
    ("in_backward", "host", "bf16"),
    ("in_forward", "device", "bf16"),
    ("delayed", "host", "fp32"),
]
CASES = [(name, "at_step", "device", "fp32") for name in MODELS] + [("transformer", *way) for way in WAYS]


@pytest.mark.parametrize(("name", "update", "stash", "precision"), CASES)
def test_the_dry_run_counts_what_a_step_asks_for(computing, name, update, stash, precision):
    make, batch = MODELS[name]
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # cuBLAS's workspace, if a test has used it
    given = batch(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"micro_batches": 3, "device": "cuda", "block_compiler": "eager", "stash": stash, "precision": precision}
    options |= UPDATES[update] | ({} if update == "at_step" else {"optimizer": optimizer})
    explainer = l2l_compile.explain(model, options)
    expected = (explainer(**given) if isinstance(given, dict) else explainer(given)).device_memory.peak
    torch._dynamo.reset()
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        models.loss_of(step(**given) if isinstance(given, dict) else step(given)).backward()
        optimizer.step()
        optimizer.zero_grad()
        l2l_compile.synchronize(step)
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert abs(asked - expected) <= 0.01 * expected, (asked, expected)


@pytest.mark.parametrize(
    "kept", [{"keep": "50KB"}, {"keep": "1GB"}, {"keep_on_host": "1GB"}, {"keep": "50KB", "keep_on_host": "50KB"}], ids=str
)
@pytest.mark.parametrize("name", ["transformer", "encoder and decoder", "skips"])
def test_the_dry_run_counts_what_forward_keeps(computing, name, kept):
    make, batch = MODELS[name]
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    given, model = batch(0), make().train()
    options = {"micro_batches": 3, "device": "cuda", "block_compiler": "eager", **kept}
    expected = l2l_compile.explain(model, options)(given).device_memory.peak
    torch._dynamo.reset()
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        models.loss_of(step(given)).backward()
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert abs(asked - expected) <= 0.01 * expected, (asked, expected)
