"""Losses of PipeDream-2BW against those of a pipeline with a flush: the byte model of `examples/quickstart.py`, on two stages.

Both train on the same batches with the same schedule of learning rates. 2BW computes gradients at the weights of the step before
(arXiv 2006.09503, section 5.1, compares losses in the same way). Writes both curves as an SVG picture.

    python examples/benchmarks/convergence.py --picture docs/convergence.svg
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from measuring import Limit, arguments, report

sys.path.insert(0, str(Path(__file__).parents[1]))
import quickstart

RANKS = 2
KINDS = {"flush": {}, "2BW": {"delay": 1}}
MEAN_OF = 10  # steps that a point of the curve, and the last figure, are the mean of


def losses_of(rank: int, kind: str, options: argparse.Namespace, folder: str) -> None:
    """Train as one stage, and save the losses."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/{kind}.store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model_options = argparse.Namespace(
        model="llama", hidden=options.hidden, layers=options.layers, context=options.context, batch=options.rows
    )
    text, _ = quickstart.load_text(None)
    torch.manual_seed(0)
    model = quickstart.build_model(model_options)
    made = torch.Generator().manual_seed(1)
    batch = quickstart.sample_batch(text, model_options, made)
    l2l_compile.pipeline(model, init_device_mesh("cpu", (RANKS,)), batch, loops=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {"schedule": "1f1b", "update": "in_forward", "max_grad_norm": 1.0, "optimizer": optimizer, **KINDS[kind]}
    settings |= {"micro_batches": options.micro_batches, "outputs": "loss", "device": "cpu"}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=settings)
    losses = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        batch = quickstart.sample_batch(text, model_options, made)
    l2l_compile.synchronize(compiled)
    if rank == 0:
        torch.save(torch.stack(losses), f"{folder}/{kind}.pt")
    dist.destroy_process_group()


def picture(curves: dict[str, list[float]]) -> str:
    """The curves as SVG: means of some steps, on a logarithmic axis."""
    width, height, left, bottom = 640, 320, 50, 40
    points = {kind: [statistics.mean(c[i : i + MEAN_OF]) for i in range(0, len(c), MEAN_OF)] for kind, c in curves.items()}
    low, high = (math.log(f(f(c) for c in points.values())) for f in (min, max))
    count = len(next(iter(curves.values())))

    def x(step: float) -> float:
        return left + step / count * (width - left - 20)

    def y(loss: float) -> float:
        return 20 + (high - math.log(loss)) / (high - low) * (height - bottom - 20)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for step in range(0, count + 1, max(1, count // 6)):
        lines.append(f'<text x="{x(step):.0f}" y="{height - 18}" text-anchor="middle">{step}</text>')
    for part in range(5):
        loss = math.exp(low + (high - low) * part / 4)
        lines.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for number, (kind, curve) in enumerate(points.items()):
        colour = ("#1f77b4", "#d62728")[number]
        path = " ".join(f"{x((i + 0.5) * MEAN_OF):.1f},{y(loss):.1f}" for i, loss in enumerate(curve))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{width - 120}" y="{40 + 18 * number}" fill="{colour}">{kind}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 3}" text-anchor="middle">step (loss in nats a byte)</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = arguments(__doc__, layers=4, hidden=256, context=128, rows=8, micro_batches=2, steps=300)
    parser.add_argument("--rate", type=float, default=5e-4, help="the largest learning rate")
    parser.add_argument("--picture", type=Path, default=Path("runs/convergence.svg"))
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.steps = 2, 64, 20
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            multiprocessing.spawn(losses_of, (kind, options, folder), nprocs=RANKS)
        curves = {kind: torch.load(f"{folder}/{kind}.pt").tolist() for kind in KINDS}
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(picture(curves))
    last = {kind: statistics.mean(curve[-MEAN_OF:]) for kind, curve in curves.items()}
    rows = [{"schedule": kind, "first": curves[kind][0], f"last {MEAN_OF}": last[kind]} for kind in KINDS]
    limit = Limit("loss of 2BW, over that of flush", last["2BW"] / last["flush"], 1.03)
    return report(options, torch.device("cpu"), rows, [limit], curves=curves)


if __name__ == "__main__":
    sys.exit(main())
