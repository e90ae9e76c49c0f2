"""A tiny language model and its data, for loops of other libraries."""

from __future__ import annotations

import functools
import time

import torch
import transformers

from l2l_compile.host.worker import Worker

VOCABULARY, LENGTH = 64, 12
STEPS, ACCUMULATE, ROWS = 20, 2, 4
EXAMPLES = 9 * ROWS  # an epoch of 9 batches: its last step has one batch instead of two
CLIP = 0.5
RATE = 1e-3


def language_model(**config):
    """Two layers of Llama, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, **config}, vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False)
    )


def in_micro_batches(model, count: int = 2):
    """The plain model, which adds up its gradients in the order of a streamed one: those of a micro-batch's rows first.

    Another order rounds otherwise in fp32, and AdamW magnifies that where a gradient is almost zero.
    """
    whole = model.forward

    @functools.wraps(whole)
    def forward(input_ids, attention_mask, labels, **of_the_loss):
        parts = zip(input_ids.chunk(count), attention_mask.chunk(count), strict=True)
        logits = torch.cat([whole(input_ids=tokens, attention_mask=mask).logits for tokens, mask in parts])
        loss = model.loss_function(logits, labels, vocab_size=VOCABULARY, **of_the_loss)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model.forward = forward
    return model


def sentences(count: int = EXAMPLES, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Tokens, with labels that leave out another number of them in each."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(0, 8, (), generator=generator))] = -100
        made.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
    return made


def largest_difference(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    """The largest difference of an entry of two models' parameters, relative to the largest entry of its parameter."""
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-8)) for a, b in pairs)


def same_bits(model: torch.nn.Module, reference: torch.nn.Module) -> bool:
    """Whether two models hold the same parameters, under the same names."""
    mine, theirs = model.state_dict(), reference.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def updates_come_late(monkeypatch) -> None:
    """The host lane waits before each piece of work."""
    do = Worker._do
    monkeypatch.setattr(Worker, "_do", lambda self, *work: (time.sleep(0.003), do(self, *work)))
