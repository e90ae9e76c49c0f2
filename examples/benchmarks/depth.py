"""Peak device memory of a training step against the number of layers: constant with streamed layers and host stashes.

python examples/benchmarks/depth.py
"""

from __future__ import annotations

import sys

import torch

import l2l_compile
from measuring import Limit, arguments, device_of, llama, report, token_batch, train_step

MOST = 1.01  # the largest peak over the smallest


def peak(layers: int, options, device: torch.device) -> dict:
    """Figures in bytes of one training step of a Llama with `layers` layers."""
    torch.compiler.reset()
    model = llama(layers, options.hidden, options.intermediate, options.heads, tokens=options.tokens)
    compiled = torch.compile(
        model, backend="l2l", options={"micro_batches": options.micro_batches, "stash": "host", "device": device}
    )
    train_step(compiled, token_batch(options.rows, options.tokens))
    stats = l2l_compile.stats(compiled)
    return {
        "layers": layers,
        "model_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "peak_device_bytes": stats.peak_device_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
    }


def main() -> int:
    parser = arguments(__doc__, hidden=256, intermediate=688, heads=4, rows=8, tokens=128, micro_batches=4)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()
    if options.quick:
        options.layers = [2, 4]
    device = device_of(options.device)
    rows = [peak(layers, options, device) for layers in options.layers]
    smallest = min(row["peak_device_bytes"] for row in rows)
    for row in rows:
        row["ratio_to_smallest"] = row["peak_device_bytes"] / smallest
    limit = Limit("largest peak over smallest", max(row["ratio_to_smallest"] for row in rows), MOST)
    return report(options, device, rows, [limit])


if __name__ == "__main__":
    sys.exit(main())
