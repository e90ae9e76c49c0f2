"""The tables of the paper (L2L, arXiv 2002.05645, section 4), measured here: BERT-large by precision, by number of
micro-batches, and by depth. All figures are our measurements; no figure of the paper is repeated.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from .cases import Case, Context, Report, Unfit, available_bytes
from .speed import TIMED, WARM
from .training import Compiled, device_options, reference_kernels, stand_in, warm_up
from .transformer import BERT_LARGE, Encoder, Size, build, token_batch

prepare = warm_up


def cases(context: Context) -> list[Case]:
    """Precision, micro-batches and depth in turn, so that each table has rows early."""
    size, rows = (BERT_LARGE, 64) if context.is_large else (Size(3, 32, 64, 2, 2, 96, 16), 8)
    bound = lambda at, rows, count, **options: functools.partial(row, context, at, rows, count, options)  # noqa: E731
    precisions = [("bf16", {"precision": "bf16"}), ("fp32", {}), ("fp16", {"precision": "fp16"})][: 3 if context.on_gpu else 1]
    by_precision = [Case(f"precision {name}", bound(size, rows, 8, **options)) for name, options in precisions]
    counts = (1, 2, 4, 16, 32) if context.is_large else (2,)
    by_count = [Case(f"{count} micro-batches of {rows}", bound(size, rows, count, precision="bf16")) for count in counts]
    depths = (12, 48, 96) if context.is_large else (2,)
    by_depth = [Case(f"{depth} layers", bound(replace(size, layers=depth), rows, 8, precision="bf16")) for depth in depths]
    turns = [
        by_precision[i : i + 1] + by_count[i : i + 1] + by_depth[i : i + 1]
        for i in range(max(map(len, (by_precision, by_count, by_depth))))
    ]
    seconds = 60 if context.on_gpu else 20
    return [Case(case.name, case.work, seconds) for turn in turns for case in turn]


def row(context: Context, size: Size, rows: int, micro_batches: int, options: dict[str, Any], report: Report) -> None:
    """Throughput and memory of one training step with AdamW. The update is in_backward, or in_forward for fp16."""
    reference_kernels()
    parameters = 12 * size.layers * size.hidden**2 + 2 * size.vocabulary * size.hidden
    if 24 * parameters > available_bytes():
        raise Unfit(f"{parameters / 1e9:.1f} G parameters with AdamW's state do not fit into the host's memory")
    model, inputs = build(Encoder, size), token_batch(size, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    update = "in_forward" if options.get("precision") == "fp16" else "in_backward"
    given = {
        **device_options(context),
        "micro_batches": micro_batches,
        "outputs": "loss",
        "optimizer": optimizer,
        "update": update,
        **options,
    }
    if context.on_gpu:
        given["block_compiler"] = "inductor"
    compiled = Compiled(model, given, stand_in(context))

    def step() -> None:
        compiled(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    report.fact("first step, with capture and compilation", context.seconds(step), "s")
    found = [context.seconds(step) for _ in range(WARM + TIMED - 1)][-TIMED:]
    compiled.synchronize()
    seconds = sorted(found)[len(found) // 2]
    stats = compiled.stats
    report.fact("samples per second", rows / seconds, "1/s", note=f"{rows} x {size.tokens} tokens, {update}")
    report.fact("peak of device memory", stats.peak_device_bytes / 1e9, "GB")
    report.fact("parameters", sum(p.numel() for p in model.parameters()))
    report.fact("fetched and pushed in a step", (stats.fetched_bytes + stats.pushed_bytes) / 1e9, "GB")
