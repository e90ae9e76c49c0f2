"""The planner on several devices: which division of a model it picks, against all of them, and against shards alone.

Brute force times every division of the model among the devices, with numbers of micro-batches, schedules, and uses of memory, by the run
that the planner uses. With `--simulate`, the pick and the best step with shards alone are simulated as well, by the executor.

    python examples/benchmarks/planner_devices.py --json planner_devices.json
    python examples/benchmarks/planner_devices.py --simulate
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from l2l_compile.command.asked import OPTIMIZERS
from l2l_compile.command.models import Workload, load
from l2l_compile.estimate.balanced_stages import most_loops
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.divisions import Devices, lines_of, rows_of, with_loops
from l2l_compile.planner.plan import Plan, plan
from l2l_compile.planner.trials import OptionTrial, Traces, Trials
from l2l_compile.report.explain import explain
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulate import simulate
from measuring import Limit, arguments, report

GIVEN = {"precision": "bf16", "outputs": "loss"}
SIZES_32B = {  # of Qwen2.5-32B, as a Llama
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
}
LLAMA = Path(__file__).parents[1] / "llama-3-8b.json"


@dataclass(frozen=True)
class Case:
    """Devices of a host, with its memory and bandwidth in bytes (a second), and a batch of all of them."""

    machine: str
    devices: int
    host_memory: float
    host_bandwidth: float
    sizes: dict[str, int]
    rows: int
    length: int
    least: float  # times as long with shards alone as in the pick

    @property
    def on(self) -> Machine:
        found = Machine.load(self.machine)
        return replace(found, host_memory=self.host_memory, host_bandwidth=self.host_bandwidth)


CASES = [
    Case("rtx4090", 8, 1.0e12, 4.0e11, SIZES_32B, 8, 2048, 1.5),  # PCIe; a server with two sockets
    Case("h100", 8, 2.0e12, 6.0e11, SIZES_32B, 512, 2048, 0.0),  # NVLink
    Case("h100", 8, 2.0e12, 6.0e11, {}, 256, 2048, 0.0),
]


def rows_from(workload: Workload, rows: int) -> dict[str, Any]:
    """The first rows of the batch."""
    assert isinstance(workload.batch, dict), "a model of transformers takes its batch by name"
    return {name: tensor[:rows] for name, tensor in workload.batch.items()}


def trials_of(workload: Workload, machine: Machine, given: dict[str, Any], rows: int) -> Trials:
    def trace(chosen: Any) -> Any:
        return workload.call(explain(workload.model, {**chosen, "device": "cpu"}))

    def trace_row(chosen: Any) -> Any:
        return replace(workload, batch=rows_from(workload, 1)).call(explain(workload.model, {**chosen, "device": "cpu"}))

    return Trials(workload.model, Traces(trace, trace_row), given, machine, rows, rows, lambda what: None)


USES: list[dict[str, Any]] = [
    {"stash": stash, "keep": keep, "prefetch": prefetch}
    for stash, keep, prefetch in itertools.product(("host", "device"), (0, "auto"), (1, 2))
]


def sets_of(layout: Layout, rows: int) -> Iterator[dict[str, Any]]:
    """Option sets of a division, without updates that are late."""
    own = rows_of(layout, rows)
    counts = [] if own is None else [1 << power for power in range(own.bit_length()) if own % (1 << power) == 0]
    for count, update in itertools.product(counts, ("in_backward", "in_forward")):
        for use in USES:
            yield {
                "micro_batches": count,
                "update": update,
                "schedule": "breadth_first",
                "keep_on_host": 0,
                "resident": None,
                **use,
            }
        if layout.depth > 1 and layout.loops == 1 and count > 1:
            for use in USES[:4]:
                yield {"micro_batches": count, "update": update, "schedule": "1f1b", "keep_on_host": 0, "resident": None, **use}


def all_trials(trials: Trials, devices: int, most: int, rows: int) -> list[OptionTrial]:
    """Brute force: every division with its option sets, at most so many of each, evenly among them."""
    for layout in Devices(devices).layouts():
        loops = list(with_loops(layout, most_loops(trials.unsplit, layout.depth) if layout.depth > 1 else 1))
        for placed in dict.fromkeys((loops[0], loops[-1])):
            chosen = list(sets_of(placed, rows))
            for options in chosen[:: max(1, math.ceil(len(chosen) / most))]:
                trials.of(placed, **options)
    return trials.all


def seconds_by_simulate(config: str, case: Case, layout: Layout, options: Any) -> float:
    """A step of a rank of the first pipeline, by the executor: this process is that rank, and nobody answers for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        rows = rows_of(layout, case.rows)
        workload = load(config, rows, case.length)
        exec("\n".join(lines_of(layout)), {"model": workload.model, "batch": workload.batch})
        optimizer = OPTIMIZERS["adamw"]([p for p in workload.model.parameters() if p.requires_grad])
        machine = replace(case.on, devices=case.devices)
        return workload.call(simulate(workload.model, machine, {**options, "optimizer": optimizer})).seconds
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def best_of(tried: Sequence[OptionTrial], shards: int) -> OptionTrial | None:
    """The fastest step with shards alone."""
    return next((trial for trial in tried if trial.fits and trial.layout == Layout(shards=shards)), None)


def measured(case: Case, config: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the pick of the planner, the best of brute force, and the best with shards alone."""
    workload = load(config, case.rows, case.length)
    given = {**GIVEN, "optimizer": OPTIMIZERS["adamw"](workload.trained)}
    begun = time.perf_counter()
    found = workload.call(plan(workload.model, case.on, given, devices=case.devices))
    taken, pick = time.perf_counter() - begun, found.best
    trials = trials_of(workload, Devices(case.devices).of(case.on), given, case.rows)
    tried = all_trials(trials, case.devices, options.sets, case.rows)
    shards = min(filter(None, (best_of(each, case.devices) for each in (tried, found.tried))), key=lambda trial: trial.seconds)
    row = {
        "machine": f"{case.devices} x {case.on.name}",
        "model": "8 B" if not case.sizes else "32 B",
        "rows": f"{case.rows} x {case.length}",
        "pick": f"{pick.layout}, {pick.options['schedule']}",
        "plan s": pick.seconds,
        "brute force s": tried[0].seconds,
        "best": str(tried[0].layout),
        "plan / brute force": pick.seconds / tried[0].seconds,
        "shards alone / plan": shards.seconds / pick.seconds,
        "tried": len(found.tried),
        "brute force sets": len(tried),
        "seconds of plan": taken,
    }
    if options.simulate:
        row |= _simulated(config, case, pick, shards)
    return row


def _simulated(config: str, case: Case, pick: Plan, shards: OptionTrial) -> dict[str, Any]:
    chosen = {name: value for name, value in pick.options.items() if name != "optimizer"}
    first = seconds_by_simulate(config, case, pick.layout, chosen)
    second = seconds_by_simulate(config, case, shards.layout, {**GIVEN, **shards.options})
    return {"plan, simulated s": first, "shards alone, simulated s": second, "simulated ratio": second / first}


def config_of(case: Case, folder: str, smaller: bool) -> str:
    sizes = dict(case.sizes)
    if smaller:
        narrow = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
        sizes = {**sizes, **narrow, "num_hidden_layers": 6, "vocab_size": 512}
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(LLAMA.read_text()), **sizes}))
    return str(path)


def main() -> int:
    parser = arguments(__doc__, sets=12)
    parser.add_argument("--simulate", action="store_true", help="also simulate the pick, and the best step with shards alone")
    parser.add_argument("--case", type=int, help="one case alone")
    options = parser.parse_args()
    cases = CASES[:1] if options.quick else CASES if options.case is None else [CASES[options.case]]
    options.sets = 2 if options.quick else options.sets
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            rows.append(measured(case, config_of(case, folder, options.quick), options))
            print(rows[-1], flush=True)
    limits = [Limit("plan, over brute force", max(row["plan / brute force"] for row in rows), 1.02)]
    if not options.quick:
        limits += [
            Limit("asked over found, shards alone over the pick", case.least / row["shards alone / plan"], 1.0)
            for case, row in zip(cases, rows, strict=True)
            if case.least
        ]
    return report(options, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    raise SystemExit(main())
