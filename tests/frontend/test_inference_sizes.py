"""Calls without gradient: lengths are symbolic from the first trace on, so that few programs serve all sizes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as T
from torch import nn

import l2l_compile
from models import WIDTH, Attention, compiled, rows

T.logging.set_verbosity_error()
VOCAB = 32


class Reader(nn.Module):
    """Embedding, layers, head; the tokens are first read where gradients are off, as rotary tables of libraries are made."""

    def __init__(self, constant=None):
        super().__init__()
        self.embed, self.head, self.constant = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), constant
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.positions = nn.Parameter(torch.randn(constant or 1, WIDTH))

    def forward(self, tokens):
        with torch.no_grad():
            scale = tokens.float().mean(1).cos()[:, None, None]
        x = self.embed(tokens) * scale + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def reader(constant=None):
    torch.manual_seed(0)
    return Reader(constant)


def tokens(*shape) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)


def count(model) -> int:
    return len(l2l_compile.programs(model))


def sizes_of(model) -> list[int]:
    """How many sizes of the inputs are symbolic, for each program. The batch is one."""
    return [len(str(program).partition("\n")[0].split(",")) for program in l2l_compile.programs(model)]


def llama():
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    return T.LlamaForCausalLM(T.LlamaConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0)).eval()


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    ).eval()


def in_place(model):
    """As the user compiles a model whose `generate` is to be streamed."""
    model.compile(backend="l2l", options={"device": "cpu", "block_compiler": "eager", "micro_batches": 2})
    return model


@pytest.mark.parametrize(
    ("make", "cache", "most"),
    [(llama, None, 2), (llama, "static", 2), (t5, None, 3), (t5, "static", 2)],
    ids=["llama", "llama-static", "t5", "t5-static"],
)
def test_generate_has_a_program_for_prompts_and_one_for_tokens(make, cache, most):
    """T5 has one more: the cache of its decoder has length 1 at the second token, and PyTorch specialises 1."""
    plain = make()
    streamed, counts = in_place(copy.deepcopy(plain)), []
    for shape in ((4, 5), (3, 7), (2, 12)):
        prompt = tokens(*shape)
        asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        expected = plain.generate(prompt, **asked)
        assert torch.equal(streamed.generate(prompt, **asked, cache_implementation=cache), expected)
        counts.append(count(streamed))
    assert counts == [most] * 3


def test_layers_with_caches_of_one_length_have_one_block():
    model = in_place(llama())
    model.generate(tokens(4, 6), max_new_tokens=4, do_sample=False)
    _, token = l2l_compile.programs(model)
    layers = [s for s in token.segments if "layers" in s.name]
    assert len(layers) == 2 and len({id(s.block) for s in layers}) == 1 and sizes_of(model) == [2, 2]


def test_evaluation_has_three_programs_for_all_sizes():
    """PyTorch specialises sizes of 1: one program for one row, one for one token, and one for all other sizes."""
    plain = llama()
    streamed = in_place(copy.deepcopy(plain))
    shapes = [(b, t) for t in (4, 1, 9) for b in (4, 3, 1) if (b, t) != (1, 1)]
    for shape in shapes:
        inputs = {"input_ids": tokens(*shape), "attention_mask": torch.ones(shape, dtype=torch.long)}
        with torch.no_grad():
            found, expected = (m(**inputs, labels=inputs["input_ids"]) for m in (streamed, plain))
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss, equal_nan=True)
    assert count(streamed) == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_embedded_inputs_have_one_program_for_all_lengths(mode):
    model = nn.Sequential(*(Attention() for _ in range(2))).double()
    step = compiled(model)
    for length in (5, 4, 9):
        x = rows(4, length, WIDTH)
        with mode():
            torch.testing.assert_close(step(x), model(x))
    assert count(step) == 1


def test_sizes_of_images_stay_constants_unless_they_change():
    step = compiled(nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        step(rows(4, 3, 8, 8, dtype=torch.float32))
    assert sizes_of(step) == [1]


def test_integers_that_an_argument_holds_are_sizes():
    linear = nn.Linear(WIDTH, WIDTH)

    def run(x, cache):
        return linear(x).unsqueeze(1).expand(-1, cache.length, -1)

    step = compiled(run)
    for length in (5, 7, 9):
        with torch.no_grad():
            assert step(rows(4, WIDTH, dtype=torch.float32), SimpleNamespace(length=length)).shape == (4, length, WIDTH)
    assert count(step) == 1


def test_a_constant_size_that_the_model_needs_is_one():
    model = reader(constant=6)
    step = compiled(model)
    with torch.no_grad():
        for batch in (4, 3):
            x = tokens(batch, 6)
            torch.testing.assert_close(step(x), model(x))
    assert sizes_of(step) == [1]


def test_training_has_constant_lengths_until_they_change():
    step, found = compiled(reader()), []
    for length in (6, 6, 9, 7):
        step(tokens(4, length)).sum().backward()
        found.append(sizes_of(step))
    assert found == [[1], [1], [1, 2], [1, 2]]


def test_evaluation_keeps_the_constant_length_of_training():
    """Its layers are compiled already. Dynamo itself makes the first other length a symbol."""
    step, found = compiled(reader()), []
    step(tokens(4, 6)).sum().backward()
    with torch.no_grad():
        for length in (6, 9, 7):
            step(tokens(4, length))
            found.append(sizes_of(step))
    assert found == [[1, 1], [1, 1, 2], [1, 1, 2]]


def test_static_calls_have_a_program_for_each_length():
    step = compiled(reader(), dynamic=False)
    with torch.no_grad():
        for length in (6, 9, 7, 9):
            step(tokens(4, length))
    assert count(step) == 3
