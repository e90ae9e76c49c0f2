"""A step of an 8 B model on an H200 with parameters and optimizer state on a disk, in virtual time, over that without one.

Everything that can be on disk is there: masters and the state of AdamW. A disk reads and writes at the same rate, both ways at once.
The figure is the step over the longer of two times: the step without the disk, and the disk alone.

    python examples/benchmarks/disk_simulated.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import l2l_compile
from l2l_compile.command.asked import OPTIMIZERS
from l2l_compile.command.models import load
from l2l_compile.lanes import Lane
from l2l_compile.simulation.machine import Machine
from measuring import Limit, arguments, report

LLAMA = Path(__file__).parents[1] / "llama-3-8b.json"
MODES: dict[str, tuple[dict[str, Any], float, str]] = {  # options, the limit, and a host_memory with which everything is on disk
    "in_backward": ({"update": "in_backward"}, 1.10, "31GB"),
    "in_forward": ({"update": "in_forward"}, 0.0, "46GB"),
    "in_forward, delay=1": ({"update": "in_forward", "delay": 1}, 1.02, "84GB"),
}
RATES = (14e9, 7e9, 3.5e9)  # bytes a second


def simulated(machine: Machine, rows: int, options: dict[str, Any]) -> l2l_compile.Simulation:
    workload = load(str(LLAMA), rows, 2048)
    given = {"precision": "bf16", "outputs": "loss", "micro_batches": max(2, rows // 8), **options}
    return workload.call(
        l2l_compile.simulate(workload.model, machine, {**given, "optimizer": OPTIMIZERS["adamw"](workload.trained)})
    )


def main() -> int:
    options = arguments(__doc__, rows=64).parse_args()
    machine, rows, limits = Machine.load("h200"), [], []
    for name, (mode, most, budget) in MODES.items():
        without = simulated(machine, options.rows, mode).seconds
        for rate in RATES[:1] if options.quick else RATES:
            on = replace(machine, disk_read=rate, disk_write=rate)
            found = simulated(on, options.rows, {**mode, "disk": "/", "host_memory": budget})
            disk = max(map(found.timeline.busy, (Lane.DISK_READ, Lane.DISK_WRITE)))
            ratio = found.seconds / max(without, disk)
            rows.append(
                {
                    "update": name,
                    "GB/s each way": rate / 1e9,
                    "step s": found.seconds,
                    "without disk s": without,
                    "disk alone s": disk,
                    "over the longer": ratio,
                    "GB written": found.stats.disk_written_bytes / 1e9,
                }
            )
            if most:
                limits.append(Limit(f"{name}, {rate / 1e9:g} GB/s: step over the longer of step and disk", ratio, most))
    return report(options, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    sys.exit(main())
