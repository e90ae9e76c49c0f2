"""Calls without gradients in virtual time."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import l2l_compile
from l2l_compile import Machine, simulate
from models import Stack, rows

MACHINE = Machine.load("h200")
MOVED = ("fetched_bytes", "resident_bytes", "offloaded_bytes", "restored_bytes")
ROWS, PROMPT = 4, 6
OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def cache_of(model, kind):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=32)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("resident", [0, "1GB"])
@pytest.mark.parametrize("device_cache", [None, 0])
def test_a_token_moves_the_bytes_of_a_real_one(threaded, kind, resident, device_cache):
    model, token = llama(), torch.ones(ROWS, 1, dtype=torch.long)
    text = torch.ones(ROWS, PROMPT, dtype=torch.long)
    options = {**OPTIONS, "resident": resident, "device_cache": device_cache}
    step, cache = torch.compile(model, backend="l2l", options=options), cache_of(model, kind)
    with torch.no_grad():
        for ids in (text, token, token, token):
            step(ids, None, None, cache)
        before = cache_of(model, kind)
        model(text, None, None, before)
        found = simulate(model, MACHINE, options)(token, None, None, before).stats
    real = l2l_compile.stats(step)
    grown = 0 if device_cache is None or kind == "static" else 3 * 2 * ROWS * 32 * 4  # bytes that a token adds to the cache
    calls = (found.restored_bytes - real.restored_bytes) / grown if grown else 0
    assert calls == int(calls) and abs(calls) < 6
    names = MOVED[: 3 if grown else 4]
    assert {n: getattr(found, n) for n in names} == {n: getattr(real, n) for n in names}


def test_a_call_takes_no_backward_and_no_optimizer():
    model, x = Stack(4), rows(6, dtype=torch.float32)
    run = simulate(model, MACHINE, {"micro_batches": 3})
    step = run(x)
    with torch.no_grad():
        call = run(x)
    assert call.seconds < 0.6 * step.seconds
    assert "s a call" in str(call) and "s a step" in str(step)
    assert not [span for span in call.timeline.spans if "backward" in span.label]


def test_a_cache_that_does_not_fit_crosses_the_link():
    """The room is that of the machine, less a fifth."""
    model = llama()
    token, cache = torch.ones(ROWS, 1, dtype=torch.long), cache_of(model, "static")
    with torch.no_grad():
        model(torch.ones(ROWS, PROMPT, dtype=torch.long), None, None, cache)
        fits, half = (
            simulate(model, replace(MACHINE, device_memory=size, device_reserve=0.0), OPTIONS)(token, None, None, cache).stats
            for size in (1e9, 1.6e5)
        )
    assert fits.restored_bytes < 1000 < half.restored_bytes
    assert half.peak_device_bytes < fits.peak_device_bytes


def test_the_weights_of_a_large_model_stay_as_far_as_they_fit():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).eval()
    total = sum(p.nbytes for p in model.parameters())
    x = torch.ones(4, 512)
    found = {}
    for share in (0.25, 0.5, 4.0):
        machine = replace(MACHINE, device_memory=share * total + 3e6, device_reserve=0.0)
        with torch.no_grad():
            found[share] = simulate(copy.deepcopy(model), machine, {"micro_batches": 2})(x)
        stats = found[share].stats
        assert stats.fetched_bytes + stats.resident_bytes == total
        assert stats.peak_device_bytes <= 0.81 * machine.device_memory
    assert found[0.25].stats.resident_bytes < found[0.5].stats.resident_bytes < found[4.0].stats.resident_bytes == total
    assert found[4.0].seconds < found[0.5].seconds < found[0.25].seconds


def test_the_host_joins_a_cache_while_the_device_works():
    """A join that takes half as long as the device's own work adds little to it."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 64}
    machine = replace(MACHINE, host_bandwidth=1e18, node=0.0, micro_batch=0.0, launch=0.0)
    with torch.device("meta"), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        cache = cache_of(model, "dynamic")
        model(torch.ones(64, 512, dtype=torch.long), None, None, cache)

    def seconds(machine):
        with torch.no_grad():
            token = torch.ones(64, 1, dtype=torch.long)
            return simulate(model, machine, {"micro_batches": 1, "resident": 0})(token, None, None, cache).seconds

    moved = 2 * sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    alone = seconds(machine)
    assert seconds(replace(machine, host_bandwidth=2 * moved / alone)) < 1.2 * alone
