"""Hooks that a model of transformers installs when hidden states, attentions or router logits are first asked for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers

import l2l_compile
from models import compiled

SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
MODELS = {
    "hidden states": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False)),
        {"output_hidden_states": True},
    ),
    "attentions": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **UNDROPPED)),
        {"output_hidden_states": True, "output_attentions": True},
    ),
    "router logits": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SIZES, num_key_value_heads=1, num_local_experts=3, use_cache=False, experts_implementation="batched_mm"
            )
        ),
        {"output_router_logits": True},
    ),
}


def step_of(model, asked):
    """The outputs and gradients of a step, and the names of its segments."""
    ids = torch.arange(24).reshape(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compiled(model, block_compiler="eager")
        found = step(input_ids=ids, labels=ids, **asked)
        found.loss.backward()
        again = step(input_ids=ids, labels=ids, **asked)
    assert torch.equal(found.loss, again.loss)
    (program,) = l2l_compile.programs(step)
    return found, [p.grad for p in model.parameters()], [s.name for s in program.segments]


@pytest.mark.parametrize(("make", "asked"), MODELS.values(), ids=MODELS)
def test_the_first_call_is_cut_as_after_a_plain_call(make, asked):
    model = make()
    plain, ids = copy.deepcopy(model), torch.arange(24).reshape(4, 6)
    outputs, gradients, segments = step_of(model, asked)
    expected = plain(input_ids=ids, labels=ids, **asked)
    expected.loss.backward()
    for name in ("hidden_states", "attentions", "router_logits"):
        for ours, theirs in zip(outputs.get(name) or (), expected.get(name) or (), strict=True):
            torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(gradients, [p.grad for p in plain.parameters()], strict=True):
        torch.testing.assert_close(ours, theirs)
    plain.zero_grad()
    torch._dynamo.reset()
    assert step_of(plain, asked)[2] == segments
    assert sum("layer" in name for name in segments) == 3


def test_a_whole_graph_is_captured_in_the_first_call():
    make, asked = MODELS["hidden states"]
    ids = torch.arange(24).reshape(4, 6)
    whole = torch.compile(make(), backend="l2l", options={"device": "cpu", "block_compiler": "eager"}, fullgraph=True)
    assert len(whole(input_ids=ids, labels=ids, **asked).hidden_states) == 4


def test_a_model_within_a_module_is_asked_by_its_caller():
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = MODELS["hidden states"][0]().model

        def forward(self, ids):
            return sum(state.mean() for state in self.trunk(ids, output_hidden_states=True).hidden_states)

    model, ids = Classifier(), torch.arange(24).reshape(4, 6)
    expected = copy.deepcopy(model)(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(model, block_compiler="eager")(ids), expected)


def test_without_transformers_function_nothing_is_replaced(monkeypatch):
    from l2l_compile.frontend.dynamo import first_calls

    monkeypatch.setattr(first_calls, "_FUNCTION", "of_another_version")
    first_calls.prepare_while_tracing()
    monkeypatch.setattr(first_calls, "_MODULE", "not_imported")
    first_calls.prepare_while_tracing()
