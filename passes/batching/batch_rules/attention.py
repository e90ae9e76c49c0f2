"""Scaled dot-product attention, in every backend: each row attends only to itself."""

from __future__ import annotations

import torch

from l2l_compile.passes.batching.batch_rules.call import DIFFERENT_DIMENSIONS, Call, Refused, TracedValue, aligned
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import Mixing, ResultState, Rows, ValueState


@rule(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    "_scaled_dot_product_attention_math.default",
)
def attention(call: Call) -> ResultState:
    """Queries, keys and values are [..., tokens, head]; results are the output, its logsumexp, and kernel state.

    Every entry of the dimensions before tokens attends separately, so rows may stand in any of them: in the batch dimension, or
    in the dimension of heads. For attention without heads, PyTorch gives a kernel [1, N, tokens, head].
    """
    query, rows = call.batched("query")
    if rows.dim >= query.ndim - 2:
        raise Refused("attends from one row of the batch to another")
    _check_keys(call, rows)
    _check_masks(call, query, rows)
    if not isinstance(call.small_out, (list, tuple)):
        return rows
    output, logsumexp, *kernel_state = call.small_out
    return rows, _of_logsumexp(call, rows, output, logsumexp), *(_of_kernel(call, value) for value in kernel_state)


def _check_keys(call: Call, rows: Rows) -> None:
    for name in ("key", "value"):
        if call.rows(name) != rows:
            raise Refused("attends to keys that are not the row's own")


def _check_masks(call: Call, query: TracedValue, rows: Rows) -> None:
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None and aligned(call[name], query.ndim) not in (None, rows):
            raise Refused(DIFFERENT_DIMENSIONS)
    if call["dropout_mask"] is not None:
        raise Refused("has no rule for a dropout mask")


def _of_logsumexp(call: Call, rows: Rows, output: torch.Tensor, logsumexp: object) -> ValueState:
    """The state of logsumexp. Some kernels return it without rows: it is empty, or padded."""
    if isinstance(logsumexp, torch.Tensor) and logsumexp.ndim > rows.dim:
        if logsumexp.shape[rows.dim] == output.shape[rows.dim]:
            return rows
    return _of_kernel(call, logsumexp)


def _of_kernel(call: Call, value: object) -> ValueState:
    return Mixing(str(call.op), "gives the state of a kernel, not rows") if isinstance(value, torch.Tensor) else None
