"""The planner against brute force on random cases: how much slower its pick is than the fastest option set that fits.

Brute force times at most `--sets` option sets of a case as the planner times them, and counts their memory as `explain` does.
First, each number of micro-batches and each update mode goes with two sets: one that needs little memory, and one that keeps all.
Then the three numbers of micro-batches that were fastest go with all values of the other options, in the update mode that was fastest.
The last ones are those without prefetch, of the fastest number alone.

python examples/benchmarks/planner_held_out.py --seed 1 --json planner-held-out.json
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.plan import plan
from l2l_compile.planner.search import DECIDED, modes_with
from l2l_compile.planner.trials import OptionTrial, Traces, Trials
from l2l_compile.report.explain import explain
from measuring import Limit, arguments, report
from planner_cases import Case, drawn

PLAIN = {name: DECIDED[name] for name in ("prefetch", "stash", "keep", "keep_on_host", "resident", "schedule")}
ALL = {**PLAIN, "stash": "device", "keep": "auto", "keep_on_host": "auto"}
GRID = {"stash": ("host", "device"), "keep": (0, "auto"), "keep_on_host": (0, "auto")}
SHARES = (0.5, 1.0)  # of the memory of the device that is free in the fastest plain step, for weights that stay there
NEAR, FAR = 1.02, 1.05  # times the best: for 19 of 20 cases, and for all


class BruteForce:
    """Tries option sets of a case, without a plan."""

    def __init__(self, case: Case, sets: int):
        self.workload, self.sets = case.workload(), sets
        given = case.given(self.workload)
        self.counts = list(dict.fromkeys([*(1 << n for n in range(case.rows.bit_length())), case.rows]))
        self.modes = modes_with(given)
        self.trials = Trials(
            self.workload.model, Traces(self._trace, self._trace), given, case.machine, case.rows, case.rows, lambda what: None
        )

    def _trace(self, chosen: Any) -> Any:
        return self.workload.call(explain(self.workload.model, {**chosen, "device": "cpu"}))

    def run(self) -> list[OptionTrial]:
        """Everything that was tried, the best first."""
        for count, mode, others in itertools.product(self.counts, self.modes, (PLAIN, ALL)):
            self.trials.of(Layout(), micro_batches=count, update=mode, **others)
        tried = self.trials.all
        counts = list(dict.fromkeys(trial.options["micro_batches"] for trial in tried))
        mode, residents = tried[0].options["update"], self._residents(tried)
        for ahead, tries in ((1, counts[:3]), (2, counts[:3]), (0, counts[:1])):
            for values in itertools.product(tries, residents, *GRID.values()):
                if len(self.trials.all) < self.sets:
                    self.trials.of(
                        Layout(),
                        update=mode,
                        prefetch=ahead,
                        **dict(zip(("micro_batches", "resident", *GRID), values, strict=True)),
                    )
        return self.trials.all

    def _residents(self, tried: list[OptionTrial]) -> list[int | None]:
        plain = next((trial for trial in tried if trial.fit is not None and trial.options["stash"] == "host"), None)
        if plain is None or plain.fit is None:
            raise RuntimeError(f"no option set can be tried: {tried[0].why_not}")
        device = plain.fit.needs[0]
        free = max(0, device.room - device.bytes)
        return list(dict.fromkeys([None, *(int(share * free) for share in SHARES)]))


def compared(case: Case, sets: int) -> dict[str, Any]:
    """A row: the pick of the planner, and the best of brute force."""
    workload, begun = case.workload(), time.process_time()
    found = workload.call(plan(workload.model, case.machine, case.given(workload), simulated=False))
    taken, tried = time.process_time() - begun, BruteForce(case, sets).run()
    best = tried[0]
    planned = found.plans[0].seconds if found.plans else float("inf")
    return {
        "case": str(case),
        "billions": workload.parameters / 1e9,
        "machine": f"{case.machine.name}, {case.machine.host_memory / 2**30:.0f} GiB",
        "plan s": planned,
        "best s": best.seconds,
        "plan / best": planned / best.seconds if best.fits else float(planned == best.seconds),
        "tried": len(found.tried),
        "sets": len(tried),
        "fit": sum(trial.fits for trial in tried),
        "CPU s of plan": taken,
        "planned": shown(found.plans[0].options) if found.plans else "",
        "best": shown(best.options),
    }


def shown(options: Any) -> str:
    """The options that were decided, in short."""
    return " ".join(f"{name}={options[name]}" for name, value in DECIDED.items() if options.get(name, value) != value)


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    ratios = [row["plan / best"] for row in rows]
    far = sum(ratio > NEAR for ratio in ratios)
    return [
        Limit(f"of {len(rows)} cases, plans that take over {NEAR} of the best", far, len(rows) // 20),
        Limit("the worst plan, over the best", max(ratios), FAR),
    ]


def main() -> int:
    parser = arguments(__doc__, seed=1, cases=20, sets=200)
    options = parser.parse_args()
    if options.quick:
        options.cases, options.sets = 2, 12
    rows = []
    for case in drawn(options.seed, options.cases, tiny=options.quick):
        rows.append(compared(case, options.sets))
        print(rows[-1], flush=True)
        torch._dynamo.reset()
    names = ("planned", "best")
    picks = [{name: row.pop(name) for name in names} for row in rows]
    return report(options, torch.device("cpu"), rows, limits_of(rows), picks=picks)


if __name__ == "__main__":
    raise SystemExit(main())
