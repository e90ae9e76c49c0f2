"""A model on the meta device is explained as the real one is, and stays as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import l2l_compile
from models import Stack, rows

OPTIONS = {"device": "cpu", "micro_batches": 2}


def tokens(device: str) -> dict[str, torch.Tensor]:
    ids = torch.zeros(4, 8, dtype=torch.int64, device=device)
    return {"input_ids": ids, "labels": ids}


def llama(**settings) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, **settings
    ))  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"use_cache": False}])
@pytest.mark.parametrize("inputs", ["meta", "cpu"])
@pytest.mark.slow(but="meta-settings1")
def test_the_report_is_that_of_the_real_model(settings, inputs):
    expected = l2l_compile.explain(llama(**settings), OPTIONS)(**tokens("cpu"))
    with torch.device("meta"):
        model = llama(**settings)
    before = {name: id(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    found = l2l_compile.explain(model, OPTIONS)(**tokens(inputs))
    assert str(found) == str(expected)
    assert {name: id(p) for name, p in [*model.named_parameters(), *model.named_buffers()]} == before
    assert all(p.is_meta for p in model.parameters())


class WithATable(Stack):
    """A stack that reads a tensor which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__(2)
        self.table = torch.ones(4)

    def forward(self, x):
        return super().forward(x).sum() + self.table.sum()


@pytest.mark.parametrize("kind", ["compiled", "compiled in place", "method"])
def test_whatever_stands_for_the_model(kind):
    def given(model):
        if kind == "compiled":
            return torch.compile(model, backend="l2l", options=OPTIONS)
        if kind == "compiled in place":
            model.compile(backend="l2l", options=OPTIONS)
            return model
        return model.forward

    x = rows(4).float()
    expected = l2l_compile.explain(given(WithATable()), OPTIONS)(x)
    with torch.device("meta"):
        model = WithATable()
    assert str(l2l_compile.explain(given(model), OPTIONS)(x.to("meta"))) == str(expected)
    assert model.table.is_meta


def test_a_failure_leaves_the_model_on_meta():
    with torch.device("meta"):
        model = Stack(2)
    with pytest.raises(Exception, match="linear"):
        l2l_compile.explain(model, OPTIONS)(torch.empty(4, 3, device="meta"))
    assert all(p.is_meta for p in model.parameters())


def test_no_memory_is_taken():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(100_000, 100_000) for _ in range(4)))
    report = l2l_compile.explain(model, OPTIONS)(torch.empty(4, 100_000, device="meta"))
    assert [s.parameter_bytes for s in report.segments] == [4 * (100_000**2 + 100_000)] * 4


def test_training_says_what_a_model_on_meta_lacks():
    with torch.device("meta"):
        model = Stack(2)
    with pytest.raises(l2l_compile.DeviceError, match="is on meta, without values: .*to_empty"):
        torch.compile(model, backend="l2l", options=OPTIONS)(torch.empty(4, 5, device="meta"))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("look", ["explain", "simulate"])
def test_a_cache_stays_as_the_caller_has_filled_it(kind, device, look):
    with torch.device(device), torch.no_grad():
        model = llama().eval()
        size = {"max_cache_len": 16} if kind is StaticCache else {}
        cache = kind(config=model.config, **size)
        ids = torch.ones(2, 5, dtype=torch.long)
        model(ids, None, None, cache)
    before = [(t, t._version, t.shape) for layer in cache.layers for t in (layer.keys, layer.values)]
    run = l2l_compile.explain(model, OPTIONS) if look == "explain" else l2l_compile.simulate(model, "h200", {"micro_batches": 2})
    with torch.no_grad():
        found = run(ids[:, :1], None, None, cache)
    if look == "explain":
        assert "up to 2 micro-batches" in str(found)
    else:
        assert found.seconds > 0 and not found.trains and found.stats.pushed_bytes == 0
    after = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert all(
        t is a and t._version == version and t.shape == shape for a, (t, version, shape) in zip(after, before, strict=True)
    )


def test_modules_among_the_arguments_are_not_copied():
    teacher, student = Stack(2), Stack(2)

    def distilled(x, model):
        assert model is teacher
        return (student(x) - model(x)).square().mean()

    assert "micro-batches" in str(l2l_compile.explain(distilled, OPTIONS)(rows(4, dtype=torch.float32), teacher))
