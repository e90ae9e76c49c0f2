"""What it costs to watch parameters between `optimizer.step()` and the next forward: a step of a loop with and without it.

Steps with and without take turns, so that other work on the machine slows both. With `update="in_forward"`, parameters are
watched twice in a step: behind backward (their gradients) and behind `optimizer.step()` (their entries as well).

    python examples/benchmarks/watching.py
"""

from __future__ import annotations

import statistics
import sys

import torch

from l2l_compile.host.watched_parameters import ParameterWatch
from measuring import Limit, arguments, report, seconds
from overhead import deep_stack

MOST = 1.02  # seconds of a step over those of a step that is not watched


def main() -> int:
    parser = arguments(__doc__, layers=48, width=64, rows=256, micro_batches=2, repeats=40)
    options = parser.parse_args()
    chosen, model, x = deep_stack(options, quick_layers=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    compiled = torch.compile(
        model, backend="l2l", options={**chosen, "optimizer": optimizer, "update": "in_forward", "compile_update": False}
    )

    def step() -> None:
        compiled(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    begin = ParameterWatch.begin
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * options.repeats):
        watched = number % 2 == 0
        ParameterWatch.begin = begin if watched else lambda self, gradients, entries: self.end()  # type: ignore[method-assign]
        taken[watched].append(seconds(step))
    ParameterWatch.begin = begin  # type: ignore[method-assign]
    medians = {watched: statistics.median(found) for watched, found in taken.items()}
    count = sum(1 for _ in model.parameters())
    rows = [
        {
            "step": "watched" if watched else "not watched",
            "ms": median * 1000,
            "us_per_parameter": (median - medians[False]) / count * 1e6,
        }
        for watched, median in medians.items()
    ]
    limit = Limit("a watched step over one that is not", medians[True] / medians[False], MOST, "")
    return report(options, chosen["device"], rows, [limit], parameters=count)


if __name__ == "__main__":
    sys.exit(main())
