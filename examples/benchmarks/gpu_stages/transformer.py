"""A decoder like Llama and an encoder like BERT, of any size, which are made and captured quickly.

Each parameter has real memory of its own, filled with copies of one block of noise: random numbers for billions of parameters
would take longer than the stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

_NOISE = 1 << 22  # entries


@dataclass(frozen=True)
class Size:
    """The size of a transformer. `groups` is the number of heads of keys and values."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    vocabulary: int
    tokens: int

    def matrix_entries(self) -> int:
        """Entries of matrices that each token is multiplied with: the layers and the head, not the table of embeddings."""
        return self.layers * self.layer_entries() + self.hidden * self.vocabulary

    def layer_entries(self) -> int:
        """Entries of the matrices of a decoder layer: attention, and the three matrices of the gated MLP."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden * self.groups // self.heads
        return attention + 3 * self.hidden * self.intermediate

    def flops(self, tokens: int) -> float:
        """Floating-point operations of a training step without recompute (PaLM, appendix B): 6 for each token and matrix
        entry, and 6 layers * length * hidden for the two causal products of attention, forward and backward."""
        return tokens * (6.0 * self.matrix_entries() + 6.0 * self.layers * self.tokens * self.hidden)


BERT_LARGE = Size(layers=24, hidden=1024, intermediate=4096, heads=16, groups=16, vocabulary=30522, tokens=512)
LLAMA_8B_WIDTH = Size(layers=8, hidden=4096, intermediate=14336, heads=32, groups=8, vocabulary=128256, tokens=2048)


class DecoderLayer(nn.Module):
    """Pre-norm, causal attention with rotary positions, gated MLP."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.groups = size.heads, size.groups
        width = size.hidden // size.heads
        linear = lambda rows, columns: nn.Linear(rows, columns, bias=False)  # noqa: E731
        self.norm, self.mlp_norm = nn.RMSNorm(size.hidden, eps=1e-5), nn.RMSNorm(size.hidden, eps=1e-5)
        self.q, self.o = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.k, self.v = linear(size.hidden, size.groups * width), linear(size.hidden, size.groups * width)
        self.gate, self.up = linear(size.hidden, size.intermediate), linear(size.hidden, size.intermediate)
        self.down = linear(size.intermediate, size.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = rotated(self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = rotated(self.k(y).unflatten(-1, (self.groups, -1)).transpose(1, 2), cos, sin)
        v = self.v(y).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=self.heads != self.groups)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the last dimension; in the dtype of `x`."""
    one, other = x.chunk(2, -1)
    return (x * cos + torch.cat((-other, one), -1) * sin).to(x.dtype)


class Decoder(nn.Module):
    """Tokens and labels [rows, length] in, mean cross entropy out. `recompute` keeps only the inputs of layers for backward."""

    def __init__(self, size: Size):
        super().__init__()
        self.size, self.recompute = size, False
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        half = self.size.hidden // self.size.heads // 2
        places = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = (places[:, None] * rates).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class EncoderLayer(nn.Module):
    """Post-norm, attention over all places, MLP with GELU: a layer of BERT."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.qkv, self.o = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.up, self.down = nn.Linear(size.hidden, size.intermediate), nn.Linear(size.intermediate, size.hidden)
        self.norm, self.mlp_norm = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v)
        x = self.norm(x + self.o(found.transpose(1, 2).flatten(2)))
        return self.mlp_norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens and labels [rows, length] in, mean cross entropy over all places out."""

    def __init__(self, size: Size):
        super().__init__()
        self.embed, self.places = nn.Embedding(size.vocabulary, size.hidden), nn.Embedding(size.tokens, size.hidden)
        self.norm = nn.LayerNorm(size.hidden)
        self.layers = nn.ModuleList(EncoderLayer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, size.vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device)))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def build(kind: type[nn.Module], size: Size, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> nn.Module:
    """A model whose matrices hold noise, its norms ones and its biases zeros."""
    with torch.device("meta"):
        model = kind(size).to(dtype)
    model = model.to_empty(device=device)
    noise = (torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * 0.02).to(device, dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                _fill(parameter.view(-1), noise, 7919 * number % 4096)
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.fill_(1)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    return model.train()


def _fill(flat: torch.Tensor, noise: torch.Tensor, first: int) -> None:
    """Fill a parameter with copies of the noise, from its entry `first` on, which differs between parameters."""
    noise = noise[first:]
    for start in range(0, flat.numel(), noise.numel()):
        part = flat[start : start + noise.numel()]
        part.copy_(noise[: part.numel()])


def token_batch(size: Size, rows: int, tokens: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random token ids and labels, int64 [rows, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tokens or size.tokens)
    return {name: torch.randint(size.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}
