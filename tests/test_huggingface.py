"""One training step of tiny Hugging Face models equals eager's."""

from __future__ import annotations

import pytest
import torch
import transformers as T

import l2l_compile
from models import assert_parity

T.logging.set_verbosity_error()
VOCAB, ROWS, LENGTH = 32, 5, 8  # three micro-batches of 2, 2 and 1 rows
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": VOCAB, "max_position_embeddings": 32}
DECODER = dict(SIZES, num_key_value_heads=1, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "problem_type": "single_label_classification"}


def language(model):
    tokens, labels = torch.randint(3, VOCAB, (ROWS, LENGTH)), torch.randint(3, VOCAB, (ROWS, LENGTH))
    labels[0, -3:] = -100  # micro-batches with other numbers of counted tokens: a mean of their means is wrong
    return model, {"input_ids": tokens, "labels": labels}


def llama():
    return language(T.LlamaForCausalLM(T.LlamaConfig(**DECODER, num_hidden_layers=2)))


def gpt2():
    return language(
        T.GPT2LMHeadModel(
            T.GPT2Config(
                vocab_size=VOCAB,
                n_positions=32,
                n_embd=16,
                n_layer=2,
                n_head=2,
                use_cache=False,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    )


def gemma2():
    return language(T.Gemma2ForCausalLM(T.Gemma2Config(**DECODER, head_dim=8, num_hidden_layers=4, sliding_window=4)))


def t5(**sizes):
    chosen = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, **sizes}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T.T5Config(vocab_size=VOCAB, dropout_rate=0.0, use_cache=False, **chosen, **tokens)
    return language(T.T5ForConditionalGeneration(config))


def bert():
    model = T.BertForSequenceClassification(T.BertConfig(**SIZES, **QUIET, num_hidden_layers=2))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return model, {
        "input_ids": torch.randint(3, VOCAB, (ROWS, LENGTH)),
        "attention_mask": mask,
        "labels": torch.randint(2, (ROWS,)),
    }


def vit():
    model = T.ViTForImageClassification(
        T.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=8,
            **QUIET,
        )
    )
    return model, {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(2, (ROWS,))}


MODELS = {make.__name__: make for make in (llama, gpt2, gemma2, t5, bert, vit)}


def build(name: str, dtype=torch.float64):
    model, inputs = MODELS[name]()
    convert = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return model.to(dtype).train(), {key: convert(value) for key, value in inputs.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(only=("gemma2", "t5"))
def test_parity_in_float64_and_layers_in_the_inner_loop(name):
    model, inputs = build(name)
    fewer = {key: value[:2] for key, value in inputs.items()}  # fewer rows than micro-batches
    step = assert_parity(model, inputs, fewer)
    (program,) = programs = l2l_compile.programs(
        step
    )  # it is not captured anew for fewer rows, and logging breaks no graph (gpt2)
    assert program.break_reason is None
    layers = [s for program in programs for s in program.segments if s.block.repeats > 1]
    assert len(layers) >= 2 and all(s.block.inner_looped for s in layers)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(only=("t5", "gemma2"))
def test_parity_on_a_device_apart_from_the_host(name, threaded):
    model, inputs = build(name)
    step = assert_parity(
        model, inputs, inputs, stash="device" if name in ("gpt2", "t5") else "host", prefetch=2 if name == "bert" else 1
    )
    assert l2l_compile.session.session_of(step).device in threaded.devices


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.slow(only="inductor")
def test_parity_in_float32(block_compiler):
    model, inputs = build("llama", torch.float32)
    assert_parity(model, inputs, tolerance=1e-5, block_compiler=block_compiler, micro_batches=ROWS)


def test_parity_with_one_dynamic_capture():
    model, inputs = build("llama")
    shorter = {key: value[:4, :6].contiguous() for key, value in inputs.items()}
    step = assert_parity(model, inputs, shorter, dynamic=True)
    assert len(l2l_compile.programs(step)) == 1
