"""The error of a simulated step against a measured step, on the host: CPU seconds of the caller's thread, one thread.

The machine is measured first (`measure_machine`), on other models; blocks are measured one by one (`blocks="measured"`). The
depths and numbers of micro-batches below are not used for that. The model is a small Llama; a step is forward and backward.

    python examples/benchmarks/prediction.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

import l2l_compile
from measuring import Limit, arguments, llama, report, token_batch, train_step

MOST = 10.0  # percent
DEPTHS, MICRO_BATCHES, COMPILERS = (4, 12, 24), (2, 4, 8), ("eager", "inductor")


class Measured:
    """Measures real steps of a compiled model, after two warm-up steps."""

    def __init__(self, layers: int, options: dict, ids: torch.Tensor, given: argparse.Namespace):
        self.compiled = torch.compile(model_of(layers, given), backend="l2l", options={**options, "device": "cpu"})
        self.ids, self.repeats = ids, given.repeats
        self.found: list[float] = []
        for _ in range(2):
            train_step(self.compiled, ids)

    def steps(self) -> None:
        """Measure `repeats` steps."""
        for _ in range(self.repeats):
            start = time.thread_time()
            train_step(self.compiled, self.ids)
            self.found.append(time.thread_time() - start)

    @property
    def seconds(self) -> float:
        """The caller's seconds of a step."""
        return statistics.median(self.found)


def predicted(
    layers: int, options: dict, ids: torch.Tensor, given: argparse.Namespace, machine: l2l_compile.Machine, blocks: str
) -> float:
    """The caller's seconds of a simulated step."""
    found = l2l_compile.simulate(model_of(layers, given), machine, options, blocks=blocks)(input_ids=ids, labels=ids)
    return found.timeline.busy("caller")


def model_of(layers: int, given: argparse.Namespace) -> torch.nn.Module:
    return llama(layers, given.hidden, 4 * given.hidden, 4, tokens=given.tokens)


def main() -> int:
    parser = arguments(__doc__, hidden=128, rows=16, tokens=64, repeats=5)
    given = parser.parse_args()
    depths, micro_batches, compilers = DEPTHS, MICRO_BATCHES, COMPILERS
    if given.quick:
        given.repeats, depths, micro_batches, compilers = 2, (2,), (2,), ("eager",)
    torch.set_num_threads(1)
    machine = l2l_compile.measure_machine("cpu")
    ids = token_batch(given.rows, given.tokens)
    rows, limits = [], []
    for compiler in compilers:
        for layers in depths:
            for count in micro_batches:
                options = {"micro_batches": count, "block_compiler": compiler}
                row = {"blocks": compiler, "layers": layers, "micro-batches": count}
                real = Measured(layers, options, ids, given)
                real.steps()
                blocks = predicted(layers, options, ids, given, machine, "measured")
                real.steps()  # before and after the simulation: other processes come and go
                row |= {"measured s": real.seconds, "predicted s": blocks}
                row["by roofline s"] = predicted(layers, options, ids, given, machine, "roofline")
                row["error %"] = 100 * (row["predicted s"] / row["measured s"] - 1)
                limits.append(Limit(f"{compiler}, {layers} layers, {count} micro-batches: error", abs(row["error %"]), MOST, "%"))
                rows.append(row)
                print(row, flush=True)
                torch._dynamo.reset()
    figures = {"node": machine.node, "micro_batch": machine.micro_batch, "host_bandwidth": machine.host_bandwidth}
    return report(given, torch.device("cpu"), rows, limits, machine_figures=figures)


if __name__ == "__main__":
    sys.exit(main())
