"""Scaled dot-product attention, in every backend: rows attend to themselves."""
from __future__ import annotations

from .rules import rule
from .values import Call, Mixing, Refused, State, aligned


@rule("_scaled_dot_product_flash_attention_for_cpu.default", "_scaled_dot_product_flash_attention.default",
      "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
      "_scaled_dot_product_fused_attention_overrideable.default", "_scaled_dot_product_attention_math.default")
def attention(call: Call) -> State | tuple[State, ...]:
    """Queries, keys and values are [N, heads, tokens, head]; results are the output, its logsumexp, and kernel state."""
    _, place = call.batched("query")
    if place.dim != 0 or call["query"].ndim < 3:
        raise Refused("attends from one row of the batch to another")
    for name in ("key", "value"):
        if call.rows(name) != place:
            raise Refused("attends to keys that are not the row's own")
    for name in ("attn_mask", "attn_bias"):
        if call[name] is not None and aligned(call[name], call["query"].ndim) not in (None, place):
            raise Refused("combines rows that stand in different dimensions")
    if call["dropout_mask"] is not None:
        raise Refused("has no rule for a dropout mask")
    if not isinstance(call.small_out, (list, tuple)):
        return place
    state = Mixing(str(call.op), "gives the state of a kernel, not rows")
    return place, *(place if i == 1 and _batched_sizes(call, out) else state if _is_tensor(out) else None
                    for i, out in enumerate(call.small_out[1:], 1))


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape")


def _batched_sizes(call: Call, value: object) -> bool:
    return _is_tensor(value) and len(value.shape) > 0 and value.shape[0] == call.small_out[0].shape[0]
