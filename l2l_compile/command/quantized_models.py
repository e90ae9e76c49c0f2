"""Linear layers with quantized weights, for models on the meta device: their bytes and operations, without a library's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from l2l_compile.errors import OptionError

_BLOCK, _BLOCK_OF_SCALES = 64, 256  # entries that share a scale, and scales that share one: QLoRA (arXiv 2305.14314), section 3


class _Quantized(torch.nn.Module):
    def __init__(self, like: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias

    def _keep(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False))


class FourBits(_Quantized):
    """NF4 with double quantization, as `Linear4bit` of bitsandbytes: 4.13 bits a weight."""

    packed: torch.Tensor
    scales: torch.Tensor
    scales_of_scales: torch.Tensor
    code: torch.Tensor

    def __init__(self, like: torch.nn.Linear):
        super().__init__(like)
        count = like.weight.numel()
        scales = -(-count // _BLOCK)
        self._keep("packed", torch.uint8, -(-count // 2), 1)
        self._keep("scales", torch.uint8, scales)
        self._keep("scales_of_scales", torch.float32, -(-scales // _BLOCK_OF_SCALES))
        self._keep("code", torch.float32, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]: the weight is dequantized whole, in bfloat16."""
        operations = torch.ops.bitsandbytes
        scales = operations.dequantize_blockwise(self.scales, self.scales_of_scales, self.code, _BLOCK_OF_SCALES, torch.float32)
        shape = [self.out_features, self.in_features]
        return linear(
            x, operations.dequantize_4bit(self.packed, scales, _BLOCK, "nf4", shape, torch.bfloat16).to(x.dtype), self.bias
        )


class EightBits(_Quantized):
    """Weight-only int8 with a scale for each output, as torchao's `Int8WeightOnlyConfig`."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, like: torch.nn.Linear):
        super().__init__(like)
        self._keep("packed", torch.int8, self.out_features, self.in_features)
        self._keep("scales", torch.bfloat16, self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]: the product with the integers in the dtype of `x`, and then the scales."""
        result = linear(x, self.packed.to(x.dtype)) * self.scales
        return result if self.bias is None else result + self.bias


QUANTIZED: dict[str, Callable[[torch.nn.Linear], torch.nn.Module]] = {"nf4": FourBits, "int8": EightBits}


def entries(model: torch.nn.Module) -> int:
    """Entries of all parameters of a model. A quantized weight counts as the weight that it stands for."""
    layers = [module for module in model.modules() if isinstance(module, _Quantized)]
    stored = {p for layer in layers for p in layer.parameters() if p is not layer.bias}
    return sum(p.numel() for p in model.parameters() if p not in stored) + sum(n.in_features * n.out_features for n in layers)


def quantize(model: Any, kind: str) -> None:
    """Replace the frozen linear layers within LoRA's by layers of this kind, "nf4" or "int8".

    Raises `OptionError` if there are none, and if bitsandbytes, whose operations "nf4" is counted by, is not installed.
    """
    _check_installed(kind)
    adapted = [module for module in model.modules() if type(getattr(module, "base_layer", None)) is torch.nn.Linear]
    _replace([(module, "base_layer") for module in adapted], kind)


def quantize_linears(model: Any, kind: str) -> None:
    """Replace all linear layers but the head, as transformers does. Raises as `quantize`."""
    _check_installed(kind)
    head = model.get_output_embeddings()
    places = ((module, name) for module in model.modules() for name, part in module.named_children() if part is not head)
    _replace([(module, name) for module, name in places if type(getattr(module, name)) is torch.nn.Linear], kind)


def _replace(places: list[tuple[torch.nn.Module, str]], kind: str) -> None:
    if not places:
        raise OptionError(f"--base {kind}: the model has no layer of the class torch.nn.Linear that could be quantized")
    for module, name in places:
        setattr(module, name, QUANTIZED[kind](getattr(module, name)))


def _check_installed(kind: str) -> None:
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401 - defines its operations
        except ImportError as error:
            raise OptionError("--base nf4 needs bitsandbytes, which is not installed: pip install bitsandbytes") from error
