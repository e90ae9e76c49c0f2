"""Tiny models of five kinds, each with a loss of its own and batches of seven rows: three micro-batches have 3, 2 and 2 rows.

Hugging Face models compute norms and the loss in float32. Here they are computed in the dtype of the parameters, so that a
comparison in float64 is in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .training import Batch

ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS = 7, 12, 96, 64, 3
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A model: `make()` gives the model with random weights, `batch(seed)` its inputs."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


class LanguageModel(nn.Module):
    """Tokens and labels in, mean cross entropy out; labels of -100 do not count."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(input_ids=input_ids).logits.flatten(0, 1), labels.flatten())


class Translator(LanguageModel):
    """An encoder and a decoder, with the model's own loss."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


class BatchNormNet(nn.Module):
    """Convolutions with BatchNorm in training mode: rows are mixed, and running statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(LAYERS)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def own_norms(model: nn.Module) -> nn.Module:
    """Replace norms that compute in float32 by norms that compute in the dtype of their input. Returns the model."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "MixtralRMSNorm", "T5LayerNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return model


def llama(tied: bool = False) -> nn.Module:
    import transformers as T

    return T.LlamaForCausalLM(T.LlamaConfig(**_SIZES, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    import transformers as T

    return T.GPT2LMHeadModel(T.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=4, use_cache=False, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    ))  # fmt: skip


def t5() -> nn.Module:
    """T5 with a smooth activation: at the edge of a ReLU, the rounding of one entry would dominate the error in 16 bits."""
    import transformers as T

    return T.T5ForConditionalGeneration(T.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=4 * WIDTH, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    ))  # fmt: skip


def mixtral() -> nn.Module:
    """Mixtral with batched products: grouped ones lack float64, and before transformers 5.23 a backward that can be traced."""
    import transformers as T

    model = T.MixtralForCausalLM(T.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))
    model.set_experts_implementation("batched_mm")
    return model


def tokens(seed: int) -> Batch:
    """Token ids and labels, int64 [7, 12]; micro-batches have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, -5:] = -100
    return {"input_ids": ids, "labels": labels}


def images(seed: int) -> Batch:
    """Images [7, 3, 8, 8] in the default dtype and classes."""
    generator = torch.Generator().manual_seed(seed)
    return {"images": torch.randn(ROWS, 3, 8, 8, generator=generator), "labels": torch.randint(5, (ROWS,), generator=generator)}


SPECS = (
    Spec("llama", lambda: LanguageModel(own_norms(llama())), tokens),
    Spec("gpt2", lambda: LanguageModel(gpt2()), tokens),
    Spec("t5", lambda: Translator(own_norms(t5())), tokens),
    Spec("moe", lambda: LanguageModel(own_norms(mixtral())), tokens),
    Spec("batchnorm", BatchNormNet, images),
)


def made(spec: Spec, dtype: torch.dtype) -> nn.Module:
    """A model in training mode, on the host, the same each time."""
    torch.manual_seed(0)
    return spec.make().to(dtype).train()


def batch(spec: Spec, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of a model in that dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in spec.batch(seed).items()}
