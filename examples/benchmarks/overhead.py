"""Python time per node of a program: a deep stack of tiny layers, minus the time inside of the lowered blocks.

It covers everything between the call of the compiled model and the gradients: Dynamo's guards, autograd's bookkeeping
of parameters, the interpreter over the program's nodes, and the stream or lane calls that each node makes. PyTorch has
one CPU thread: waking a second thread for a tensor of 32 numbers takes longer than the measured time.

    python examples/benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

import l2l_compile
from l2l_compile.runtime import segment_run
from measuring import Limit, arguments, device_of, report, seconds

MOST = 100.0  # microseconds per node


class Layer(torch.nn.Module):
    """A residual MLP after a LayerNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def deep_stack(options: argparse.Namespace, quick_layers: int) -> tuple[dict, torch.nn.Module, torch.Tensor]:
    """A stack of tiny layers and its batch, and the options of the backend. `--quick` has fewer layers, and five repeats."""
    if options.quick:
        options.layers, options.repeats = quick_layers, 5
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(options.width) for _ in range(options.layers)))
    chosen = {"micro_batches": options.micro_batches, "block_compiler": "eager", "device": device_of(options.device)}
    return chosen, model, torch.randn(options.rows, options.width)


class InBlocks:
    """From now on, adds up the seconds in lowered blocks, over all segments and micro-batches."""

    def __init__(self) -> None:
        self.seconds = 0.0
        original = segment_run._Run.call

        def timed(*operands):
            start = time.perf_counter()
            try:
                return original(*operands)
            finally:
                self.seconds += time.perf_counter() - start

        segment_run._Run.call = timed


def step(model: torch.nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


def main() -> int:
    parser = arguments(__doc__, layers=200, width=8, rows=4, micro_batches=1, repeats=30)
    options = parser.parse_args()
    chosen, model, x = deep_stack(options, quick_layers=20)
    compiled = torch.compile(model, backend="l2l", options=chosen)
    step(compiled, x)
    (program,) = l2l_compile.programs(compiled)
    nodes = len(program.forward.graph.nodes) + len(program.backward.graph.nodes)

    in_blocks, total, own, runner = InBlocks(), [], [], []
    for _ in range(options.repeats):
        in_blocks.seconds = 0.0
        total.append(seconds(lambda: step(compiled, x)))
        own.append(total[-1] - in_blocks.seconds)
        runner.append(l2l_compile.stats(compiled).seconds - in_blocks.seconds)
    microseconds = {
        "whole step": statistics.median(total) / nodes * 1e6,
        "without blocks": statistics.median(own) / nodes * 1e6,
        "of which the program's interpreter": statistics.median(runner) / nodes * 1e6,
    }
    rows = [{"part": part, "us_per_node": figure, "ms_per_step": figure * nodes / 1000} for part, figure in microseconds.items()]
    print(f"{nodes} nodes, {len(program.segments)} segments, {len(program.blocks)} blocks")
    limit = Limit("Python time per node", microseconds["without blocks"], MOST, "us")
    return report(options, chosen["device"], rows, [limit], nodes=nodes)


if __name__ == "__main__":
    sys.exit(main())
