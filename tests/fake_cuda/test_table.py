"""docs/cuda.md has the calls of a step, as counted. `UPDATE_DOCUMENTS=1 make cuda-dry` writes them anew."""

from __future__ import annotations

import itertools
from pathlib import Path

from marked_tables import assert_written
from training_loop import UPDATES, training

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
COLUMNS = {
    "allocations": ("Malloc", "HostAlloc"),
    "page-locks": ("HostRegister",),
    "host waits": ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize"),
    "stream waits": ("StreamWaitEvent",),
    "copies to the device": ("h2d", "h2d pageable"),
    "copies to the host": ("d2h", "d2h pageable"),
    "launches": ("launches", "products"),
}


def test_the_documented_calls_of_a_step_are_those_counted(runtime):
    rows = [["`update`", "`stash`", "`precision`", *COLUMNS], ["---"] * 3 + ["---:"] * len(COLUMNS)]
    for update, stash, precision in itertools.product(UPDATES, ("device", "host"), ("fp32", "bf16")):
        _, step = training(update, stash=stash, precision=precision)
        for _ in range(3):
            step()
        runtime.reset()
        step()
        counts = runtime.counts
        found = [f"{sum(counts.get(name, 0) for name in names):,}" for names in COLUMNS.values()]
        rows.append(["`in_forward`, `delay=1`" if update == "delayed" else f"`{update}`", stash, precision, *found])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    assert_written(PAGE, "calls", table)
