"""Tokens per second of a training step at 8B width, with each `update` and `stash`, compared with a resident model and FSDP2.

TFLOP/s are the model's own operations over the time of a step. For each token, they are 6 for each entry of a matrix that it is
multiplied with, and 6 * layers * length * hidden for causal attention. Recompute does not count. A step is forward, backward
and AdamW. Its time is the median of a few steps after two warm-up steps. A step ends when the next one could begin.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from l2l_compile import profile

from .cases import Case, Context, Report, Unfit
from .rows import TRACES
from .timeline_report import tell_lanes
from .training import Compiled, device_options, reference_kernels, stand_in, warm_up
from .transformer import LLAMA_8B_WIDTH, Decoder, Size, build, token_batch

WARM, TIMED = 2, 3
NEEDS = 64 << 30  # bytes of the host for 2.8 G parameters: weights, gradients, AdamW's state, and wires


@dataclass(frozen=True)
class Load:
    """The model size and the batch of a step."""

    size: Size
    rows: int
    micro_batches: int

    @property
    def tokens(self) -> int:
        return self.rows * self.size.tokens


ON_GPU = Load(LLAMA_8B_WIDTH, 32, 8)


def load(context: Context) -> Load:
    if context.is_large:
        return ON_GPU
    return Load(Size(layers=3, hidden=64, intermediate=128, heads=4, groups=2, vocabulary=256, tokens=16), 8, 4)


prepare = warm_up


_BF16 = {"precision": "bf16"}
# the options of streamed steps by the name of their case
STREAMED: dict[str, dict[str, Any]] = {
    "in_backward, stash=host": {**_BF16, "update": "in_backward"},
    "in_forward, stash=host": {**_BF16, "update": "in_forward"},
    'in_backward, keep="auto", resident': {**_BF16, "update": "in_backward", "keep": "auto", "resident": "30GB"},
    "delay=1, an eighth of the batch": {**_BF16, "update": "in_forward", "delay": 1},
    "in_backward, stash=host, an eighth of the batch": {**_BF16, "update": "in_backward"},
    "at_step, stash=host": _BF16,
    "in_backward, stash=device": {**_BF16, "update": "in_backward", "stash": "device"},
    "at_step, stash=host, fp32, an eighth of the batch": {},
    "at_step, stash=device": {**_BF16, "stash": "device"},
    "in_forward, stash=device": {**_BF16, "update": "in_forward", "stash": "device"},
}
_ORDER = (  # most important first
    "in_backward, stash=host",
    "resident, recompute, layers compiled",
    "FSDP2 with CPUOffloadPolicy",
    "in_forward, stash=host",
    'in_backward, keep="auto", resident',
    "delay=1, an eighth of the batch",
    "in_backward, stash=host, an eighth of the batch",
    "resident, an eighth of the batch",
    "FSDP2, an eighth of the batch",
    "at_step, stash=host",
    "in_backward, stash=device",
    "at_step, stash=host, fp32, an eighth of the batch",
    "at_step, stash=device",
    "in_forward, stash=device",
    "resident, fp32, an eighth of the batch",
)
_ON_CPU = (*_ORDER[:3], 'in_backward, keep="auto", resident')


def load_of(case: str, whole: Load) -> Load:
    """The load of a case: the whole one, or an eighth of its rows."""
    if "an eighth" not in case:
        return whole
    return replace(whole, rows=max(whole.rows // 8, 1), micro_batches=max(whole.micro_batches // 8, 1))


def cases(context: Context) -> list[Case]:
    rivals: dict[str, functools.partial] = {
        "resident, recompute, layers compiled": functools.partial(resident),
        "resident, an eighth of the batch": functools.partial(resident),
        "resident, fp32, an eighth of the batch": functools.partial(resident, dtype=None),
        "FSDP2 with CPUOffloadPolicy": functools.partial(sharded),
        "FSDP2, an eighth of the batch": functools.partial(sharded),
    }
    seconds, needs = 120 if context.on_gpu else 30, NEEDS if context.is_large else 0
    found = []
    for name in _ORDER if context.on_gpu else _ON_CPU:
        work = functools.partial(stream, options=STREAMED[name]) if name in STREAMED else rivals[name]
        is_sharded = work.func is sharded
        bound = functools.partial(work, context, load_of(name, load(context)))
        found.append(Case(name, bound, seconds, alone=is_sharded and context.on_gpu, gpu=is_sharded, needs=needs))
    return found


def stream(context: Context, on: Load, report: Report, options: dict[str, Any]) -> None:
    """Measure streamed steps with some options. If there is time left, one more step is traced."""
    reference_kernels()
    start = time.perf_counter()
    model, inputs = build(Decoder, on.size), token_batch(on.size, on.rows)
    report.fact("making the model", time.perf_counter() - start, "s")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = {**device_options(context), "micro_batches": on.micro_batches, "outputs": "loss", **options}
    if context.on_gpu:
        given["block_compiler"] = "inductor"
    if options.get("update", "at_step") != "at_step":
        given["optimizer"] = optimizer
    compiled = Compiled(model, given, stand_in(context))

    def step() -> float:
        loss = compiled(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    measure(context, on, step, report)
    compiled.synchronize()
    report.fact("peak of device memory", compiled.stats.peak_device_bytes / 1e9, "GB", should="less than resident's")
    report.fact("page-locked", compiled.device.pinned.used / 1e9, "GB")
    if context.left > 5:
        with profile(compiled.called, trace_path(report.case)) as traced:
            step()
            compiled.synchronize()
        tell_lanes(traced.timeline, compiled.stats, report)


def trace_path(case: str) -> Path | None:
    """The file for the Chrome trace of a case; None without the option `--traces`."""
    folder = os.environ.get(TRACES)
    return Path(folder) / (re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-") + ".json") if folder else None


def measure(context: Context, on: Load, step: Callable[[], float], report: Report) -> None:
    """Report the seconds of a step, from up to `TIMED` steps, fewer if the time is short."""
    losses: list[float] = []
    first = context.seconds(lambda: losses.append(step()))
    report.fact("first step, with capture and compilation", first, "s")
    report.fact("loss of the first step", losses[0], "", should="the same everywhere but for rounding: the weights are the same")
    second = context.seconds(step)
    report.fact("second step", second, "s")
    found = []
    while len(found) < TIMED and context.left > 2 * second:
        found.append(context.seconds(step))
    seconds = statistics.median(found or [second])
    report.fact("step", seconds, "s", note=f"{len(found)} steps: {', '.join(f'{s:.3f}' for s in found)}")
    report.fact("tokens per second", on.tokens / seconds, "1/s", should="near resident's: the link is hidden")
    done = on.size.flops(on.tokens) / seconds / 1e12
    report.fact(
        "TFLOP/s of the model", done, "TFLOP/s", should="6/8 of a large product's (stage copies), less what is no product"
    )


def resident(context: Context, on: Load, report: Report, dtype: torch.dtype | None = torch.bfloat16) -> None:
    """The same model resident on the GPU, with compiled layers and recompute, by default in bf16 by autocast."""
    from .rivals import Resident

    reference_kernels()
    rival = Resident(on.size, context.device, dtype, compile_layers=context.on_gpu)
    inputs = token_batch(on.size, on.rows)
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    measure(context, on, lambda: rival.step(inputs, on.micro_batches), report)
    if context.on_gpu:
        report.fact("peak of device memory", torch.cuda.max_memory_allocated(context.device) / 1e9, "GB")


def sharded(context: Context, on: Load, report: Report) -> None:
    from .rivals import Sharded, process_group

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        raise Unfit("this PyTorch has no NCCL")
    with process_group(context.device):
        rival = Sharded(on.size, context.device)
        inputs = token_batch(on.size, on.rows)
        torch.cuda.reset_peak_memory_stats(context.device)
        measure(context, on, lambda: rival.step(inputs, on.micro_batches), report)
        report.fact("peak of device memory", torch.cuda.max_memory_allocated(context.device) / 1e9, "GB")
