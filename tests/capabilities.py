"""What PyTorch's own kernels can do on this CPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_lstm_in_bf16() -> bool:
    """Whether an LSTM runs under `torch.autocast` with bf16: without AVX-512, oneDNN has no kernel for it, and eager raises."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            torch.nn.LSTM(5, 4)(torch.randn(3, 2, 5))
        except RuntimeError:
            return False
    return True
