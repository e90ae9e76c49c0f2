"""An AdamW step with the 16-bit copy of the weights: one compiled pass against `AdamW(fused=True)` and a cast.

The compiled pass updates layer by layer, as the host lane does. It takes gradients in the dtype of the link: bf16 (the default
of precision="bf16") or fp32. PyTorch's step updates all layers in one call, from fp32 gradients that exist already. The cast
writes into buffers that exist already.

    python examples/benchmarks/update.py
"""

from __future__ import annotations

import statistics
import sys

import torch

from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import hyperparameters
from l2l_compile.host.wire import Wires
from l2l_compile.memory.pages import unlocked
from measuring import Limit, Work, arguments, interleaved, report

MOST = 1 / 1.4  # limit, relative to PyTorch's seconds
HOST = torch.device("cpu")


def layer(width: int) -> list[torch.nn.Parameter]:
    """The parameters of a transformer layer: matrices of 12 * width² entries together, and vectors."""
    matrices = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    vectors = [(width,)] * 6 + [(4 * width,)]
    return [torch.nn.Parameter(torch.randn(size) * 0.02) for size in matrices + vectors]


def adamw(layers: list[list[torch.nn.Parameter]], **options) -> torch.optim.AdamW:
    """AdamW with two param_groups: vectors have no weight decay."""
    every = [p for parameters in layers for p in parameters]
    groups = [{"params": [p for p in every if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    return torch.optim.AdamW(groups, lr=1e-4, **options)


def one_pass(layers: list[list[torch.nn.Parameter]], gradients: list[list[torch.Tensor]]) -> Work:
    """The host lane's update of every layer."""
    optimizer, wires = adamw(layers), Wires(unlocked())
    for parameters in layers:
        wires.load(parameters, [torch.bfloat16 if p.dim() > 1 else torch.float32 for p in parameters])
    step = CompiledStep(optimizer, wires, torch.get_num_threads(), GradientMemory())

    @torch.no_grad()
    def work() -> None:
        groups = hyperparameters(optimizer)
        for parameters, found in zip(reversed(layers), reversed(gradients), strict=True):
            step.on(groups, dict(zip(parameters, found, strict=True)), 1.0)

    return work


def two_passes(layers: list[list[torch.nn.Parameter]], gradients: list[list[torch.Tensor]]) -> Work:
    """PyTorch's fused step, then the cast into copies."""
    optimizer = adamw(layers, fused=True)
    parameters = [p for own in layers for p in own]
    for p, gradient in zip(parameters, (g for own in gradients for g in own), strict=True):
        p.grad = gradient
    copies = [torch.empty_like(p, dtype=torch.bfloat16 if p.dim() > 1 else torch.float32) for p in parameters]

    @torch.no_grad()
    def work() -> None:
        optimizer.step()
        for copy, p in zip(copies, parameters, strict=True):
            copy.copy_(p)

    return work


def main() -> int:
    options = arguments(__doc__, layers=2, width=2048, repeats=15).parse_args()
    if options.quick:
        options.layers, options.width, options.repeats = 2, 256, 3
    torch.manual_seed(0)
    layers = [layer(options.width) for _ in range(options.layers)]
    wide = [[torch.randn_like(p) * 1e-3 for p in own] for own in layers]
    narrow = [[g.bfloat16() if g.dim() > 1 else g for g in own] for own in wide]
    works = {
        "AdamW(fused=True), then the cast": two_passes(
            [[torch.nn.Parameter(p.detach().clone()) for p in own] for own in layers], wide
        ),
        "one pass, gradients in bf16": one_pass(layers, narrow),
        "one pass, gradients in fp32": one_pass(layers, wide),
    }
    for work in works.values():
        work()  # the first step makes the optimizer's state by PyTorch's own code
    medians = {name: statistics.median(times) for name, times in interleaved(works, options.repeats).items()}
    base = next(iter(medians.values()))
    entries = sum(p.numel() for own in layers for p in own)
    rows = [{"update": n, "ms": 1000 * s, "of PyTorch's": s / base, "times faster": base / s} for n, s in medians.items()]
    print(f"{entries:,} parameters")
    limit = Limit("one pass, gradients in bf16, of PyTorch's seconds", medians["one pass, gradients in bf16"] / base, MOST)
    return report(options, HOST, rows, [limit], parameters=entries)


if __name__ == "__main__":
    sys.exit(main())
