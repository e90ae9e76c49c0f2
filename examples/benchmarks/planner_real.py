"""The options that a planner chooses for this host, against a grid of option sets that are really run: seconds of training steps.

The machine is measured first (`measure_machine`). Then all sets of the grid train in turn, and the fastest by its median is chosen; it
and the planned options train in turn again, and the figure is the ratio of their medians there: the least of many medians is too small.
The device is the host, so its peak is that of the values of layers at work.

    python examples/benchmarks/planner_real.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from typing import Any

import torch

import l2l_compile
from l2l_compile.planner.plan import Plans
from l2l_compile.planner.search import DECIDED
from measuring import Limit, arguments, interleaved, llama, report, token_batch

GRID = {"micro_batches": (1, 4, 16), "update": ("in_forward", "in_backward"), "keep": (0, "auto")}
MOST = 1.05  # times the best of the grid


class Training:
    """A model that trains with the options of a set: those that are given, and those that are decided."""

    def __init__(self, given: argparse.Namespace, chosen: dict[str, Any]):
        self.model, self.ids, self.in_a_row = model_of(given), token_batch(given.rows, given.tokens), given.steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        options = {**fixed(given), **chosen, "optimizer": self.optimizer, "device": "cpu"}
        self.compiled = torch.compile(self.model, backend="l2l", options=options)

    def steps(self) -> None:
        """Some steps in a row, until the last parameter is new: the update of a step may overlap the next forward."""
        for _ in range(self.in_a_row):
            self.optimizer.zero_grad(set_to_none=True)
            self.compiled(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
        l2l_compile.synchronize(self.compiled)

    @property
    def peak(self) -> int:
        """Bytes of values of layers at work."""
        return l2l_compile.stats(self.compiled).peak_device_bytes


def model_of(given: argparse.Namespace) -> torch.nn.Module:
    return llama(given.layers, given.hidden, 4 * given.hidden, 4, tokens=given.tokens)


def fixed(given: argparse.Namespace) -> dict[str, Any]:
    return {"outputs": "loss", "block_compiler": "eager" if given.quick else "inductor"}


def planned(given: argparse.Namespace, machine: l2l_compile.Machine) -> Plans:
    model, ids = model_of(given), token_batch(given.rows, given.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return l2l_compile.plan(model, machine, fixed(given), optimizer=optimizer)(input_ids=ids, labels=ids)


def device_bytes(given: argparse.Namespace, found: Plans) -> int:
    """The device bytes of the best plan, as its dry run counts them."""
    model, ids = model_of(given), token_batch(given.rows, given.tokens)
    options = {**found.best.options, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4), "device": "cpu"}
    counted = l2l_compile.explain(model, options)(input_ids=ids, labels=ids).on(found.machine)
    (need,) = found.best.needs  # one memory: the host is the device
    assert need.bytes == counted.host_memory.total + counted.device_memory.peak - counted.device_memory.weights
    return counted.device_memory.peak


def name_of(chosen: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def main() -> int:
    parser = arguments(__doc__, layers=8, hidden=256, rows=16, tokens=128, steps=3, repeats=5)
    given, grid = parser.parse_args(), GRID
    if given.quick:
        given.layers, given.hidden, given.tokens, given.repeats = 2, 64, 16, 1
        grid = {**GRID, "micro_batches": (4,), "keep": (0,)}
    torch.set_num_threads(1)
    machine = l2l_compile.measure_machine("cpu")
    found = planned(given, machine)
    print(found, flush=True)
    expected = device_bytes(given, found)
    sets = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    trained = {name_of(chosen): Training(given, chosen) for chosen in sets}
    times = interleaved({name: each.steps for name, each in trained.items()}, given.repeats)
    medians = {name: statistics.median(seconds) / given.steps for name, seconds in times.items()}
    best = min(medians, key=medians.__getitem__)
    plan = Training(given, {name: found.best.options[name] for name in DECIDED})
    again = interleaved({"plan": plan.steps, "best": trained[best].steps}, 3 * given.repeats)
    plan_s, best_s = (statistics.median(again[name]) / given.steps for name in ("plan", "best"))
    rows = [{"options": name, "median s": seconds, "peak bytes": trained[name].peak} for name, seconds in medians.items()]
    rows.append({"options": f"the best again: {best}", "median s": best_s, "peak bytes": trained[best].peak})
    picked = name_of({name: found.best.options[name] for name in GRID})
    rows.append({"options": f"the plan: {picked}", "median s": plan_s, "peak bytes": plan.peak})
    limits = [
        Limit("steps of the plan, over the best of the grid", plan_s / best_s, MOST),
        Limit("device bytes, off the plan's", abs(plan.peak - expected), 0, "bytes"),
    ]
    return report(given, torch.device("cpu"), rows, limits, predicted_seconds=found.best.seconds, expected_bytes=expected)


if __name__ == "__main__":
    sys.exit(main())
