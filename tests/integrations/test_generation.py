"""`generate` of transformers on a streamed model gives eager's tokens, and a decode loop sees each change of its cache."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as T
from transformers.cache_utils import DynamicCache, StaticCache

import l2l_compile

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # of Mamba
T.logging.set_verbosity_error()

# Untied weights of this size: with those of transformers, a tiny model repeats one token whatever is in the cache.
WEIGHTS = {"initializer_range": 0.3, "tie_word_embeddings": False}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
PLAIN = {**TOKENS, **SIZES, **WEIGHTS}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
WINDOWS = {**GROUPED, "head_dim": 8, "sliding_window": 4}
STACKS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BOTH = {**TOKENS, **STACKS, "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
UNTIED = {"init_std": 0.3, "tie_word_embeddings": False}


def llama():
    return T.LlamaForCausalLM(T.LlamaConfig(**GROUPED))


def qwen3():
    return T.Qwen3ForCausalLM(T.Qwen3Config(**GROUPED, head_dim=8))


def mistral():
    return T.MistralForCausalLM(T.MistralConfig(**GROUPED, sliding_window=4))


def gemma2():
    """A layer with a window, and one without."""
    return T.Gemma2ForCausalLM(T.Gemma2Config(**WINDOWS, query_pre_attn_scalar=8))


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    return T.Gemma3ForCausalLM(T.Gemma3TextConfig(**WINDOWS, query_pre_attn_scalar=8, layer_types=layers))


def mixtral():
    return T.MixtralForCausalLM(T.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))


def gpt2():
    return T.GPT2LMHeadModel(T.GPT2Config(**TOKENS, **WEIGHTS, n_positions=64, n_embd=32, n_layer=2, n_head=4))


def gpt_neox():
    return T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**PLAIN))


def phi():
    return T.PhiForCausalLM(T.PhiConfig(**PLAIN))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = T.T5Config(**TOKENS, **sizes, decoder_start_token_id=0, initializer_factor=3.0, tie_word_embeddings=False)
    return T.T5ForConditionalGeneration(config)


def bart():
    config = T.BartConfig(**BOTH, **UNTIED, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None)
    return T.BartForConditionalGeneration(config)


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 3}
    config = T.WhisperConfig(**BOTH, **UNTIED, **sizes, suppress_tokens=None, begin_suppress_tokens=None)
    return T.WhisperForConditionalGeneration(config)


def mamba():
    return T.MambaForCausalLM(T.MambaConfig(**TOKENS, **WEIGHTS, hidden_size=32, num_hidden_layers=2, state_size=8))


MODELS = [llama, qwen3, mistral, gemma2, mixtral, gpt2, gpt_neox, phi, t5, bart, whisper, mamba]
SEARCHES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}
NEW = 7


def streamed(build, micro_batches):
    """A model and its streamed copy."""
    torch.manual_seed(0)
    eager = build().eval()
    eager.generation_config.eos_token_id = None  # no row ends early
    model = copy.deepcopy(eager)
    model.compile(backend="l2l", options={"device": "cpu", "block_compiler": "eager", "micro_batches": micro_batches})
    return eager, model


def prompt(build, rows, length=7):
    """Text, or sound for Whisper. Left of the text are up to three pads, in each row another number of them."""
    drawn = torch.Generator().manual_seed(rows)
    if build is whisper:
        return {"input_features": torch.randn(rows, 8, 40, generator=drawn)}
    text = torch.randint(3, 64, (rows, length), generator=drawn)
    is_read = (torch.arange(length) >= (torch.arange(rows) % 4 + (rows == 1))[:, None]).long()
    return {"input_ids": text * is_read, "attention_mask": is_read}


def generated(model, inputs, search, cache):
    torch.manual_seed(5)
    kind = {"cache_implementation": "static"} if cache == "static" else {}
    made = model.generate(**inputs, **SEARCHES[search], **kind, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    assert made.shape[1] >= NEW
    return made


def same_tokens(build, cache, rows, micro_batches, searches=SEARCHES):
    eager, model = streamed(build, micro_batches)
    inputs = prompt(build, rows)
    for search in searches:
        expected, found = (generated(each, inputs, search, cache) for each in (eager, model))
        assert expected[:, -NEW:].unique().numel() > 1, "a model that repeats one token shows nothing"
        assert torch.equal(found, expected), search


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.slow(but="llama")
def test_tokens_with_a_growing_cache_are_those_of_eager(build):
    searches = [search for search in SEARCHES if build is not mamba or search != "beams"]  # twice as many programs
    same_tokens(build, "dynamic", 8, 3, searches)


@pytest.mark.parametrize("build", [mistral, gemma3, whisper], ids=lambda build: build.__name__)
@pytest.mark.slow(but="mistral")
def test_tokens_with_a_static_cache_are_those_of_eager(build):
    same_tokens(build, "static", 8, 2)


@pytest.mark.parametrize(("build", "cache"), [(llama, "dynamic"), (t5, "static")])
@pytest.mark.slow
def test_tokens_of_one_row_are_those_of_eager(build, cache):
    same_tokens(build, cache, 1, 2, ("greedy", "sampling"))


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


def unchanged(cache):
    return cache


def scaled(cache):
    for layer in cache.layers:
        layer.keys.mul_(0.5)
    return cache


def replaced(cache):
    for layer in cache.layers:
        layer.values = layer.values.flip(0)
    return cache


def reordered(cache):
    cache.reorder_cache(torch.tensor([3, 2, 0, 0]))
    return cache


def selected(cache):
    cache.batch_select_indices(torch.tensor([1, 1, 3, 0]))
    return cache


def cropped(cache):
    cache.crop(-2)  # two tokens fewer
    return cache


def shared(cache):
    """A branch: another cache with the same tensors."""
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])


def copied(cache):
    return copy.deepcopy(cache)


def emptied(cache):
    cache.reset()
    return cache


CHANGES = {
    "dynamic": [unchanged, scaled, replaced, reordered, selected, cropped, shared, copied],
    "static": [unchanged, scaled, reordered, cropped, copied, emptied],
}


@torch.no_grad()
def logits(model, kind, change, text):
    """Of a prompt and three tokens, of three tokens with a changed cache, and of one more with the cache before."""
    static = {"config": model.config, "max_cache_len": 16}
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(**static)
    found = [model(text, None, None, cache).logits]

    def tokens(cache, seed):
        for token in torch.randint(3, 64, (3, 4, 1), generator=torch.Generator().manual_seed(seed)):
            found.append(model(token, None, None, cache).logits)

    tokens(cache, 1)
    tokens(change(cache), 2)
    tokens(cache, 3)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.slow(but="dynamic")
def test_changes_of_a_cache_between_tokens_are_seen(kind):
    eager, model = streamed(llama, 3)
    text = prompt(llama, 4)["input_ids"].clamp(min=3)
    usual = logits(eager, kind, unchanged, text)
    for change in CHANGES[kind]:
        expected, found = (logits(each, kind, change, text) for each in (eager, model))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), change.__name__
        is_other = change not in (unchanged, copied, shared)
        assert torch.allclose(expected[:, :13], usual[:, :13]) != is_other, f"{change.__name__} does not do what it should"


@pytest.mark.parametrize("kind", [llama, t5], ids=lambda build: build.__name__)
def test_the_weights_of_a_text_cross_the_link_once(threaded, kind):
    torch.manual_seed(0)
    eager = kind().eval()
    model = copy.deepcopy(eager)
    model.compile(backend="l2l", options={"device": "cpu", "block_compiler": "eager", "micro_batches": 2, "resident": 1 << 30})
    for rows in (4, 6):
        inputs = prompt(kind, rows)
        expected, found = (generated(each, inputs, "greedy", "dynamic") for each in (eager, model))
        assert torch.equal(found, expected)
        assert l2l_compile.stats(model).fetched_bytes == 0 < l2l_compile.stats(model).resident_bytes
