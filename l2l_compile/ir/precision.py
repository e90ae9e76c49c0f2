"""The dtypes behind the options `precision` and `gradient_wire`."""

from __future__ import annotations

import torch

from l2l_compile.ir.values import TensorSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gradient_dtype(spec: TensorSpec, gradient_wire: str | None) -> torch.dtype:
    """The dtype in which the gradient of a weight crosses the link. Vectors and float64 weights keep their dtype."""
    if gradient_wire is None or len(spec.shape) < 2 or spec.dtype.itemsize > 4:
        return spec.dtype
    return DTYPES[gradient_wire]
