"""Simulated steps against those that `gpu.py` measured on a GPU, from its figures in `runs/`; no GPU is needed.

The machine is the one of the package for that GPU, with the memory and the bandwidth of the host of the run: they differ from
host to host. The error of a case is its simulated time over its measured time, less one.

    python examples/benchmarks/predicted_gpu.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

import l2l_compile
from gpu_stages.speed import ON_GPU, STREAMED, load_of
from gpu_stages.transformer import Decoder, build, token_batch
from measuring import Limit, arguments, report

RUNS = Path(__file__).parent / "runs"
OF_THE_HOST = ("host_bandwidth", "host_memory", "host_reserve")
MOST = 10.0  # percent


def machine_of(run: dict, name: str) -> l2l_compile.Machine:
    """The machine of the package, with the host of the run."""
    figures = {row["figure"]: row["value"] for row in run["stages"]["copies"]["rows"] if row["case"] == "a machine file"}
    return dataclasses.replace(l2l_compile.Machine.load(name), **{name: figures[name] for name in OF_THE_HOST})


def measured(run: dict) -> dict[str, float]:
    """Seconds of a step by the name of the case; of several timed steps, the median."""
    rows = (row for row in run["stages"]["speed"]["rows"] if row["figure"] == "step" and row["case"] in STREAMED)
    return {row["case"]: row["value"] for row in rows if not row["note"].startswith("0 steps")}


def predicted(case: str, machine: l2l_compile.Machine) -> float:
    """Seconds of a simulated step, the optimizer's included."""
    on, model = load_of(case, ON_GPU), build(Decoder, ON_GPU.size, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"micro_batches": on.micro_batches, "outputs": "loss", "optimizer": optimizer, **STREAMED[case]}
    return l2l_compile.simulate(model, machine, options)(**token_batch(on.size, on.rows)).seconds


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, default=RUNS / "gpu-2026-11-29-nvidia-h200-2.json", help="figures of gpu.py")
    parser.add_argument("--machine", default="h200", help="the machine of the package for this GPU")
    given = parser.parse_args()
    run = json.loads(given.run.read_text())
    machine, rows, limits = machine_of(run, given.machine), [], []
    for case, seconds in measured(run).items():
        found = predicted(case, machine)
        rows.append({"case": case, "measured s": seconds, "simulated s": found, "error %": 100 * (found / seconds - 1)})
        limits.append(Limit(f"{case}: error", abs(rows[-1]["error %"]), MOST, "%"))
        torch._dynamo.reset()
        print(rows[-1], flush=True)
        if given.quick:
            break
    return report(given, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    sys.exit(main())
