"""The planner against a grid of option sets made by hand: how much slower its pick is than the best set of the grid that fits.

python examples/benchmarks/planner.py --json planner.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from l2l_compile.command.asked import OPTIMIZERS
from l2l_compile.command.models import Workload, load
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.plan import plan
from l2l_compile.planner.trials import OptionTrial, Traces, Trials
from l2l_compile.report.explain import explain
from l2l_compile.simulation.machine import Machine
from measuring import Limit, arguments, report

CONFIG = str(Path(__file__).parents[1] / "llama-3-8b.json")
GIVEN = {"precision": "bf16", "outputs": "loss"}
GRID: dict[str, tuple] = {
    "micro_batches": (2, 8, 32),
    "update": ("in_forward", "in_backward"),
    "stash": ("host", "device"),
    "keep": (0, "auto"),
    "keep_on_host": (0, "auto"),
    "prefetch": (1, 2),
}
CASES = [  # machine, bytes of its host (None: its own), rows, tokens of a row
    ("h200", None, 64, 2048),
    ("h100", None, 64, 2048),
    ("rtx4090", 128e9, 8, 2048),
    ("rtx4090", 256e9, 32, 1024),
    ("rtx4090", 256e9, 64, 512),
]


def fastest_of_grid(workload: Workload, machine: Machine, given: dict[str, Any], sets: int) -> OptionTrial:
    """The fastest set of the grid that fits, timed as the planner times."""

    def trace(chosen: Any) -> Any:
        return workload.call(explain(workload.model, {**chosen, "device": "cpu"}))

    trials = Trials(workload.model, Traces(trace, trace), given, machine, workload.rows, workload.rows, lambda what: None)
    chosen = list(itertools.product(*GRID.values()))
    for values in chosen[:: max(1, len(chosen) // sets)]:
        trials.of(Layout(), **dict(zip(GRID, values, strict=True)))
    return trials.all[0]


def measured(case: tuple, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the pick of the planner, and the best of the grid."""
    name, host, rows, length = case
    machine = Machine.load(name)
    machine = replace(machine, host_memory=host) if host is not None else machine
    workload = load(options.config, rows, length)
    given = {**GIVEN, "optimizer": OPTIMIZERS["adamw"](workload.trained)}
    begun = time.perf_counter()
    found = workload.call(plan(workload.model, machine, given, simulated=not options.quick))
    taken, best = time.perf_counter() - begun, fastest_of_grid(workload, machine, given, options.sets)
    where = machine.name if host is None else f"{machine.name}, {host / 1e9:.0f} GB"
    return {
        "machine": where,
        "rows": f"{rows} x {length}",
        "plan s": found.best.seconds,
        "grid s": best.seconds,
        "plan / grid": found.best.seconds / best.seconds,
        "tried": len(found.tried),
        "seconds of plan": taken,
    }


def smaller(config: str, folder: str) -> str:
    """A config with two narrow layers."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(Path(config).read_text()), **sizes}))
    return str(path)


def main() -> int:
    parser = arguments(__doc__, sets=96)
    parser.add_argument("--config", default=CONFIG, help="a config of transformers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.sets, options.config = 4, smaller(options.config, folder)
        rows = [measured(case, options) for case in (CASES[:1] if options.quick else CASES)]
    worst = max(row["plan / grid"] for row in rows)
    options.config = Path(options.config).name  # figures have no path of a machine
    return report(options, torch.device("cpu"), rows, [Limit("plan, over the best of the grid", worst, 1.02)])


if __name__ == "__main__":
    raise SystemExit(main())
