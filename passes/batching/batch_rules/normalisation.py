"""Normalisation: over the features of a row, never over rows."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import Mixing, ValueState

NORMALISES = "normalises over the batch; freeze the statistics with .eval() to split it"


@rule("native_layer_norm.default", "_fused_rms_norm.default")
def over_last_dims(call: Call) -> tuple[ValueState, ...]:
    """The results are the normalised value, and statistics with one entry for each group of normalised entries."""
    call.invariant("weight", "bias")
    value, rows = call.batched("input")
    if rows.dim >= value.ndim - len(call["normalized_shape"]):
        raise Refused("normalises over the batch")
    return (rows,) * len(call.small_out)


@rule("native_group_norm.default", sizes=("N",))
def group_norm(call: Call) -> tuple[ValueState, ...]:
    """[N, C, ...]; mean and rstd are [N, groups]."""
    call.invariant("weight", "bias")
    _, rows = call.batched("input")
    if rows.dim != 0:
        raise Refused("normalises over the batch")
    return (rows,) * 3


@rule(
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
    "_batch_norm_with_update.default",
    "_batch_norm_with_update_functional.default",
    "_native_batch_norm_legit_no_training.default",
    "_batch_norm_no_update.default",
    "cudnn_batch_norm.default",
    "miopen_batch_norm.default",
    writes=("running_mean", "running_var"),
    writes_if="training",
)
def batch_norm(call: Call) -> tuple[ValueState, ...]:
    """With frozen statistics, a scale and a shift of each channel. In training, rows must be channels (instance_norm)."""
    _, rows = call.batched("input")
    others = {name: call.rows(name) for name in ("weight", "bias", "running_mean", "running_var") if call[name] is not None}
    saved = Mixing(str(call.op), "keeps statistics that are no rows")
    rest = len(call.small_out) - 1
    if rows.dim == 1:
        if set(others.values()) - {rows.at(0)}:
            raise Refused("takes rows of the batch as its channels")
        return rows, *(saved,) * rest
    if rows.dim != 0 or _training(call):
        raise Refused(NORMALISES)
    call.invariant(*others)
    return rows, *(saved,) * rest


def _training(call: Call) -> bool:
    name = str(call.op)
    if "no_training" in name or "no_update" in name:
        return False
    return call["training"] is not False  # ops without the argument (no_stats has it, with_update does not) train
