"""Tests that device memory does not depend on depth: the peak at three depths, with stashes on the host. Also measures
page-locked memory over batches of several lengths.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from l2l_compile import explain

from .cases import Case, Context, Report, Unfit, available_bytes
from .training import Compiled, device_options, stand_in, warm_up
from .transformer import BERT_LARGE, Encoder, Size, build, token_batch

MOST = 1.01  # the largest peak over the smallest


prepare = warm_up


def cases(context: Context) -> list[Case]:
    """On a GPU, a second process begins with 384 layers, since their capture takes as long as all other cases.

    On a GPU, each depth has a process of its own, since cuBLAS keeps memory for every stream that it has seen.
    """
    of = lambda depth: Case(f"{depth} layers", functools.partial(peak, context, depth), 110, alone=context.on_gpu)  # noqa: E731
    turns = Case("three lengths in turn", functools.partial(lengths, context), 40)
    return [of(24), of(384), of(96), turns] if context.is_large else [of(4), of(12), turns]


def size_of(context: Context) -> Size:
    """BERT-large's width with a small vocabulary, so that layers dominate the figures; a tiny size on a CPU."""
    if context.is_large:
        return replace(BERT_LARGE, vocabulary=1024, tokens=128)
    return Size(layers=4, hidden=64, intermediate=256, heads=4, groups=4, vocabulary=96, tokens=16)


def peak(context: Context, depth: int, report: Report) -> None:
    """Peak of the first step. Parameters are bf16 on a GPU: 384 layers are 9.7 GB, and their gradients as much."""
    size = replace(size_of(context), layers=depth)
    dtype = torch.bfloat16 if context.is_large else torch.float32
    needed = 3 * depth * 12 * size.hidden**2 * dtype.itemsize
    if needed > (available := available_bytes()):
        raise Unfit(f"{depth} layers need {needed / 1e9:.0f} GB of the host, {available / 1e9:.0f} are there")
    model = build(Encoder, size, dtype)
    options = {**device_options(context), "micro_batches": 4, "stash": "host"}
    compiled, batch = Compiled(model, options), token_batch(size, 32 if context.is_large else 8)
    workspace = cublas_workspace(context, compiled, dtype)
    seconds = context.seconds(lambda: compiled(**batch).backward())
    peaks = noted(context, depth, compiled.stats.peak_device_bytes)
    if depth == min(peaks):
        expected = explain(model, options)(**batch).device_memory.peak
        report.fact("workspace of cuBLAS", workspace, "bytes", should="in the peaks, and not counted by explain")
        ratio = (peaks[depth] - workspace) / expected
        report("peak less that workspace over that of explain", ratio, most=MOST, should="1: explain counts what a step takes")
    parameters = sum(p.numel() for p in model.parameters())
    report.fact("peak of device memory", peaks[depth], "bytes")
    report.fact("parameters", parameters)
    report.fact("first step, with capture", seconds, "s")
    if len(peaks) > 1:
        report(
            "largest peak over the smallest so far",
            max(peaks.values()) / min(peaks.values()),
            most=MOST,
            note=f"depths {sorted(peaks)}",
        )


def cublas_workspace(context: Context, compiled: Compiled, dtype: torch.dtype) -> int:
    """Bytes that cuBLAS keeps for the compute lane from its first product on."""
    if not context.on_gpu:
        return 0
    before = torch.cuda.memory_allocated(context.device)
    with torch.cuda.stream(compiled.device.lanes["compute"].stream):
        for kind in {dtype, torch.float32}:
            torch.ones(64, 64, device=context.device, dtype=kind) @ torch.ones(64, 64, device=context.device, dtype=kind)
    context.synchronize()
    return torch.cuda.memory_allocated(context.device) - before


def noted(context: Context, depth: int, value: int) -> dict[int, int]:
    """Add a peak to the file that the processes of this stage share. Returns all peaks in it by depth."""
    path = context.journal.path.parent / "peaks"
    with path.open("a") as file:
        file.write(f"{depth} {value}\n")
    return {int(d): int(v) for d, v in (line.split() for line in path.read_text().splitlines())}


def lengths(context: Context, report: Report) -> None:
    """Train on batches of three lengths, twice. The second time, buffers of the first time are used again."""
    size = size_of(context)
    size = replace(size, tokens=4 * size.tokens, layers=8 if context.is_large else 2)
    model = build(Encoder, size)
    precision = {"precision": "bf16"}
    compiled = Compiled(model, {**device_options(context), "micro_batches": 4, **precision}, stand_in(context))
    found = []
    for turn in (1, 2):
        for tokens in (size.tokens // 4, size.tokens // 2, size.tokens):
            compiled(**token_batch(size, 8, tokens)).backward()
            model.zero_grad(set_to_none=True)
            pinned = compiled.device.pinned.used
            report.fact(f"page-locked after length {tokens}, turn {turn}", pinned, "bytes")
        found.append(pinned)
    should = "1, but for buffers that happen to be in use at once"
    report("page-locked after turn 2 over turn 1", found[1] / max(found[0], 1), most=1.1, should=should)
