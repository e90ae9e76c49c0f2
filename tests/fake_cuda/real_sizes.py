"""Models in sizes that are used, with two layers each. Kernels are compiled for their sizes; their numbers mean nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zoo import Batch, benchmark_models

ROWS, LENGTH = 6, 512


def _gpt2_xl() -> nn.Module:
    import transformers as T

    return T.GPT2LMHeadModel(T.GPT2Config(
        n_embd=1600, n_layer=2, n_head=25, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def _mistral_7b() -> nn.Module:
    import transformers as T

    return T.MistralForCausalLM(T.MistralConfig(num_hidden_layers=2, sliding_window=None, use_cache=False))


def _empty(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model with parameters and buffers that nothing has filled, which saves the time of their random numbers."""

    def made() -> nn.Module:
        with torch.device("meta"):
            model = make()
        return benchmark_models.LanguageModel(model.to_empty(device="cpu"))

    return made


def _tokens(seed: int) -> Batch:
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "GPT-2 XL": (_empty(_gpt2_xl), _tokens),
    "Mistral 7B": (_empty(_mistral_7b), _tokens),
}
