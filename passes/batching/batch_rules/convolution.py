"""Convolution, pooling and resampling: each image is a row by itself; its pixels are no rows."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import DIFFERENT_DIMENSIONS, Call, Refused
from l2l_compile.passes.batching.batch_rules.rules import rule
from l2l_compile.passes.batching.batch_rules.states import ResultState, Rows


def _outermost(call: Call, name: str) -> Rows:
    _, rows = call.batched(name)
    if rows.dim != 0:
        raise Refused("needs the batch in its first dimension")
    return rows


@rule("convolution.default", "_convolution.default")
def convolution(call: Call) -> Rows:
    """Input [N, C, ...]; the weight and its groups are the same for every row."""
    call.invariant("weight", "bias")
    if call["input"].ndim != call["weight"].ndim:
        raise Refused("needs the batch in its first dimension")
    return _outermost(call, "input")


def _spatial(*names: str, spatial: int) -> None:
    """Registers ops that work on each plane of the last `spatial` dimensions separately, and keep the dimensions before."""

    @rule(*names)
    def planes(call: Call) -> ResultState:
        tensor, rows = call.batched()
        if rows.dim >= tensor.ndim - spatial:
            raise Refused("works along the batch dimension")
        return call.each(rows)


_spatial(
    "max_pool2d_with_indices.default",
    "avg_pool2d.default",
    "_adaptive_avg_pool2d.default",
    "adaptive_max_pool2d.default",
    spatial=2,
)
_spatial(
    "max_pool3d_with_indices.default",
    "avg_pool3d.default",
    "_adaptive_avg_pool3d.default",
    "adaptive_max_pool3d.default",
    spatial=3,
)
_spatial("upsample_nearest1d.default", "_upsample_nearest_exact1d.default", "upsample_linear1d.default", spatial=1)
_spatial(
    "upsample_nearest2d.default",
    "_upsample_nearest_exact2d.default",
    "upsample_bilinear2d.default",
    "upsample_bicubic2d.default",
    "_upsample_bilinear2d_aa.default",
    "_upsample_bicubic2d_aa.default",
    spatial=2,
)
_spatial("upsample_nearest3d.default", "_upsample_nearest_exact3d.default", "upsample_trilinear3d.default", spatial=3)
_spatial("pixel_shuffle.default", "pixel_unshuffle.default", spatial=3)


@rule("channel_shuffle.default")
def channel_shuffle(call: Call) -> Rows:
    return _outermost(call, "self")


@rule("im2col.default", "col2im.default")
def unfold_images(call: Call) -> Rows:
    """[N, C, H, W] to [N, C * kernel, windows] and back; without N the batch would be the channels."""
    if call["self"].ndim != (4 if "im2col" in str(call.op) else 3):
        raise Refused("needs the batch in its first dimension")
    return _outermost(call, "self")


@rule("grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(call: Call) -> Rows:
    """Each image is read at its own row of the grid."""
    if call.rows("grid") != call.rows("input"):
        raise Refused(DIFFERENT_DIMENSIONS)
    return _outermost(call, "input")


@rule("affine_grid_generator.default", sizes=("size",))
def affine_grid(call: Call) -> Rows:
    return _outermost(call, "theta")
