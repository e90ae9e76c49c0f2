"""A model on the meta device is explained as the real one is, and stays as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
