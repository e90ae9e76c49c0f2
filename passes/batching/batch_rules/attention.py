"""Scaled dot-product attention, in every backend: rows attend to themselves."""

from __future__ import annotations

from .rules import rule
from .values import Batch, Call, Mixing, Refused, State, aligned


@rule(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    "_scaled_dot_product_attention_math.default",
)
def attention(call: Call) -> State | tuple[State, ...]:
    """Queries, keys and values are [..., tokens, head]; results are the output, its logsumexp, and kernel state.

    Every entry of the dimensions before tokens attends by itself, so rows may stand in any of them: in that of the batch, or in
    that of the heads, as where PyTorch gives a kernel [1, N, tokens, head] for attention without heads.
    """
    query, place = call.batched("query")
    if place.dim >= query.ndim - 2:
        raise Refused("attends from one row of the batch to another")
    for name in ("key", "value"):
        if call.rows(name) != place:
            raise Refused("attends to keys that are not the row's own")
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None and aligned(call[name], query.ndim) not in (None, place):
            raise Refused("combines rows that stand in different dimensions")
    if call["dropout_mask"] is not None:
        raise Refused("has no rule for a dropout mask")
    if not isinstance(call.small_out, (list, tuple)):
        return place
    state = Mixing(str(call.op), "gives the state of a kernel, not rows")
    return place, *(
        place if i == 1 and _batched_sizes(call, place, out) else state if _is_tensor(out) else None
        for i, out in enumerate(call.small_out[1:], 1)
    )


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape")


def _batched_sizes(call: Call, place: Batch, value: object) -> bool:
    return _is_tensor(value) and len(value.shape) > place.dim and value.shape[place.dim] == call.small_out[0].shape[place.dim]
