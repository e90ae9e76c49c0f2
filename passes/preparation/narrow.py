"""Cross mixed precision (CMP; L2L, section 2.3): fp32 on the host, 16 bits on the link and on the device.

Before a captured graph is cut into segments, its specs are narrowed:

    parameters of two or more dimensions    cross the link in 16 bits; one-dimensional parameters stay in fp32, since they
                                            have few bytes and their rounding matters most for the error
    tables of embeddings                    16 bits as well, but always fp16: autocast looks rows up in fp32, and the eight
                                            bits of precision of bf16 would cause the largest error of all. Entries beyond
                                            65504 become infinite. Where a table is also used as a matrix (a tied head), it
                                            is treated there as any other matrix
    activations between segments            16 bits, for batched values that are computed from parameters. Within a block
                                            they are fp32, as under autocast: a residual stream is rounded once per layer,
                                            not once per addition. Their gradients are fp32 too, since they do not leave
                                            the device
    parameters of 16 bits                   unchanged: a frozen base has the format of the link already
    everything else                         unchanged: masks, rotary tables, scalars, scales of quantized weights, outputs of the
                                            model

Every block then runs under `torch.autocast` of that dtype, which decides in which width each operation computes. The block sees
all of these values in fp32. Otherwise an operation that autocast does not know would get a 16-bit weight together with 32-bit
values. Where autocast narrows a value that was widened right before, `lowering/widening.py` removes both casts.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import LOSS_TERM, Captured
from l2l_compile.ir.precision import DTYPES
from l2l_compile.passes.compilation import Compilation, Fact


@dataclass(frozen=True)
class Narrow:
    """With `precision="bf16"` or `"fp16"`, parameters and activations have 16 bits on the link and between segments."""

    name: ClassVar[str] = "narrow"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, compilation: Compilation) -> None:
        if compilation.options.precision != "fp32":
            narrow(compilation.captured, compilation.options.precision)


def narrow(captured: Captured, precision: str) -> None:
    """Narrow the specs of a captured graph to `precision` ("bf16" or "fp16"), and autocast its blocks.

    Raises `L2LError` if the model runs under its own `torch.autocast` or has float64 parameters; warns about trained 16-bit parameters.
    """
    option = f"the option precision={precision!r}"
    if captured.autocast is not None:
        raise L2LError(f"torch.autocast is on around the compiled model, and {option} does its work: leave one of them out")
    parameters = [i for i in captured.weights if i.kind == "parameter"]
    wide = [i.name for i in parameters if captured.specs[i.node].dtype is torch.float64]
    if wide:
        raise L2LError(
            f"parameter '{wide[0]}' is float64, but {option} keeps float32 on the host: convert the model with .float()"
        )
    trained = [i for i in parameters if captured.grad_enabled and captured.specs[i.node].requires_grad]
    short = [i.name for i in trained if captured.specs[i.node].dtype in (torch.bfloat16, torch.float16)]
    if short:
        warnings.warn(
            f"{len(short)} trained parameters such as '{short[0]}' have 16 bits on the host: {option} keeps no wider copy of them, and small "
            "updates are lost. Convert the parameters that are trained with .float(); frozen ones may stay as they are",
            stacklevel=2,
        )
    captured.autocast = DTYPES[precision]
    for weight in parameters:
        spec = captured.specs[weight.node]
        if spec.dtype is torch.float32 and len(spec.shape) >= 2 and weight.inner is None:
            captured.specs[weight.node] = replace(spec, dtype=captured.autocast, compute_dtype=torch.float32)
            captured.lookups[weight.node] = replace(spec, dtype=torch.float16, compute_dtype=torch.float32)
    for node in _activations(captured):
        spec = captured.specs[node]
        if spec.dtype is torch.float32:
            captured.specs[node] = replace(spec, dtype=captured.autocast, compute_dtype=torch.float32)


def _activations(captured: Captured) -> set:
    """Batched values that are computed from parameters, except the outputs of the model and the terms of its losses."""
    computed = {i.node for i in captured.weights if i.kind == "parameter"}
    found = set()
    for node in captured.graph.nodes:
        if node.op.startswith("call_") and any(a in computed for a in node.all_input_nodes):
            computed.add(node)
            if node in captured.specs and captured.specs[node].batch is not None and LOSS_TERM not in node.meta:
                found.add(node)
    return found - set(captured.outputs)
