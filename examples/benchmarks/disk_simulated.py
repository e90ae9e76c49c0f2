"""A step of an 8 B model on an H200 with parameters and optimizer state on a disk, in virtual time, over that without one.

What is on disk: masters and the state of AdamW, all of them or about a third; or copies that cross the link as well. In backward, some updates
wait for the next forward if the budget has room for their gradients. A disk reads and writes
at the same rate, both ways at once. The figure is the step over the longer of two times: the step without the disk, and the disk alone.

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
IN_BACKWARD = {"update": "in_backward"}
LATE = {"update": "in_forward", "delay": 1}
MODES: list[tuple[str, dict[str, Any], float, str]] = [  # with the limit, and the host_memory
    ("in_backward", IN_BACKWARD, 1.10, "25GB"),
    ("in_backward, no gradients wait", IN_BACKWARD, 0.0, "19.9GB"),
    ("in_backward, a third", IN_BACKWARD, 1.10, "82GB"),
    ("in_backward, copies too", IN_BACKWARD, 0.0, "4GB"),
    ("in_forward", {"update": "in_forward"}, 0.0, "32.8GB"),
    ("in_forward, delay=1", LATE, 1.02, "64.9GB"),
]
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
    for name, mode, most, budget in MODES:
        without = simulated(machine, options.rows, mode).seconds
        for rate in RATES[:1] if options.quick else RATES:
            on = replace(machine, disk_read=rate, disk_write=rate)
            found = simulated(on, options.rows, {**mode, "disk": "/", "host_memory": budget})
            disk = max(map(found.timeline.busy, (Lane.DISK_READ, Lane.DISK_WRITE)))
            ratio = found.seconds / max(without, disk)
            rows.append(
                {
                    "update": name,
                    "host_memory": budget,
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
