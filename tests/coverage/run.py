"""Which models train with `torch.compile(model, backend="l2l")`, and how? A table of every class of five libraries.

    pip install -e ".[coverage]"                       # timm, torchvision, diffusers, torchaudio; without, they are skipped
    python tests/coverage/run.py                       # continues where it was stopped
    python tests/coverage/run.py --fresh               # forgets earlier results: two to three hours on two cores (an estimate)
    python tests/coverage/run.py BertForMaskedLM CTC   # runs these classes and tasks again, and keeps all other results
    python tests/coverage/run.py --sample 25           # of each library, some classes that have no result yet

A tiny model of each class (see `tiny_models`) trains one step in eager and one with l2l, in float64, or in float32 if a kernel
of the model lacks float64. Loss and gradients are compared. If they differ in a float64 model that computes in a narrower dtype
somewhere, the tolerance of that dtype holds. If they still differ, or l2l fails, a step with `torch.compile(backend="eager")`
shows whether Dynamo is the cause. If the class has a depth, a model of twice the layers takes a step with l2l as well: blocks
and peak device memory should not grow with it. A class that crashes or hangs only costs a worker process. Results are appended
to `runs/coverage.jsonl` as they come; the table is written to `tests/coverage/table.md`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import l2l_compile
import l2l_compile.passes
from l2l_compile.errors import L2LError
from step import Narrowest, Step, dtype_of, error_of, rows_reversed, train
from structure import depth_of, growing_lists, shape_of, stacks
from table import ACROSS, SPLIT, table, verdict
from tiny_models import LAYERS, Job, jobs, make, missing, settings
from workers import run

__all__ = ["ACROSS", "SPLIT", "check", "collect", "error_of", "jobs", "main", "read", "rows_reversed", "table", "verdict"]

Result = dict[str, Any]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # norm-wise, relative
OPTIONS = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu"}
OURS = (*l2l_compile.__path__, *l2l_compile.passes.__path__)


# ---- one class -------------------------------------------------------------------------------------------------------


def check(job: Job, dynamo_only: bool = False) -> Result:
    """The row of one class. With `dynamo_only`, l2l does not run: for a class that killed its worker."""
    torch.set_num_threads(1)
    gc.collect()
    started = time.process_time()
    with warnings.catch_warnings(action="ignore"):
        row = row_of(job, dynamo_only)
    return row | {"cpu_seconds": round(time.process_time() - started, 1)}


def row_of(job: Job, dynamo_only: bool) -> Result:
    trained = trains_eagerly(job)
    if isinstance(trained, str):
        return {"status": "eager fails", "reason": trained}
    model, inputs, setting, expected = trained
    reordered = train(copy.deepcopy(model), {name: rows_reversed(value) for name, value in inputs.items()})
    row = {"setting": setting.name}
    if error_of(expected, train(copy.deepcopy(model), inputs, seed=1), reordered)[0] > 1e-9:
        return row | {"status": "random", "reason": "another seed gives another step"}
    deeper = deeper_model(job, setting, model)
    growing = growing_lists(model, deeper[0]) if deeper else ()
    if not dynamo_only:
        row |= compiled_step(model, inputs, expected, reordered, "l2l", OPTIONS, growing)
    if row.get("status") != "parity":
        dynamo = compiled_step(model, inputs, expected, reordered, "eager", None)
        row["dynamo"] = " ".join((dynamo["status"], dynamo["reason"])).strip()
    elif growing:
        row["deep"] = deep_step(*deeper, growing)
    return row


def trains_eagerly(job: Job) -> tuple[nn.Module, dict[str, Any], Any, Step] | str:
    """Model, inputs, setting and step of the first setting that trains; if none trains, the text of the first error."""
    problem = ""
    for setting in settings(job):
        for dtype in TOLERANCE:
            try:
                model, inputs = made(job, setting, dtype)
                step = train(copy.deepcopy(model), inputs)
                if not torch.isfinite(step[0]):
                    raise ArithmeticError(f"the loss is {step[0].item()}")
                return model, inputs, setting, step
            except Exception as error:  # noqa: BLE001 - the next setting may work
                problem = problem or describe(error)
                if not isinstance(error, RuntimeError | ArithmeticError):
                    break  # another dtype does not help
    return problem


def made(job: Job, setting: Any, dtype: torch.dtype, layers: int = LAYERS) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = make(job, setting, layers)
    return model.to(dtype), tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def deeper_model(job: Job, setting: Any, model: nn.Module) -> tuple[nn.Module, dict[str, Any]] | None:
    """A model with up to twice the layers, and its inputs; None if the setting cannot make it."""
    dtype = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    try:
        return made(job, setting, dtype, layers=2 * LAYERS)
    except Exception:  # noqa: BLE001 - for example, a list in the configuration must be as long as its depth
        return None


def deep_step(model: nn.Module, inputs: dict[str, Any], growing: set[str]) -> Result:
    """Layers, blocks and peak device memory of a step of the deeper model."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="l2l", options=OPTIONS)
    try:
        train(model, inputs, run=compiled)
    except Exception as error:  # noqa: BLE001 - a row of the table
        return {"failed": describe(error)}
    return {"layers": sum(len(layers) for _, layers in stacks(model, growing)), **depth_of(compiled)}


def compiled_step(
    model: nn.Module,
    inputs: dict,
    expected: Step,
    reordered: Step,
    backend: str,
    options: dict | None,
    growing: Collection[str] = (),
) -> Result:
    """Status and reason of a step with this backend; for l2l, also figures of the compiled programs."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, options=options)
    try:
        step = train(model, inputs, run=compiled)
    except Exception as error:  # noqa: BLE001 - any failure is a row of the table
        return {"status": "refused" if isinstance(error, L2LError) else "crash", "reason": describe(error)}
    error, where = error_of(expected, step, reordered)
    dtype = dtype_of(expected)
    if not error <= TOLERANCE[dtype]:
        dtype = dtype_inside(model, inputs, dtype)
    row = {"status": "parity", "reason": "", "dtype": str(dtype).removeprefix("torch.")}
    if not error <= TOLERANCE.get(dtype, 0):
        row |= {"status": "differs", "reason": f"{where} by {error:.1e}"}
    return {**row, **shape_of(model, compiled, step[1], growing), "error": error} if backend == "l2l" else row


def dtype_inside(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype in which an eager step computes: its rounding depends on how many rows are computed at once."""
    with Narrowest(dtype) as seen:
        train(copy.deepcopy(model), inputs)
    return seen.dtype


def describe(error: BaseException) -> str:
    """The type and the beginning of an error, and its innermost line in this project, or else the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if f.filename.startswith(OURS)), frames[-1])
    error = getattr(error, "inner_exception", error)  # the error that Dynamo wraps
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]} ({Path(frame.filename).name}:{frame.lineno})"


# ---- all classes -----------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Result]:
    """The rows so far by library and class, the last row of each. An incomplete line, from a killed run, is left out."""
    rows: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["library"] + "/" + row["name"]] = row
    return rows


def collect(todo: list, path: Path, work: Callable[..., Result] = check, **how: Any) -> dict[str, Result]:
    """Do jobs, append each row to the file as it comes, and return all rows of the file. `how` goes to `workers.run`."""
    rows = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(job: Job, row: Result) -> None:
        rows[job.key] = {"library": job.library, "name": job.name, "task": job.task, **row}
        with path.open("a") as file:
            file.write("\n" + json.dumps(rows[job.key]))  # on a new line, since a killed run may leave an incomplete one

    for number, (job, row) in enumerate(run(todo, work, **how), 1):
        keep(job, row)
        reason = row.get("reason", "")[:150]
        print(f"{number:3d}/{len(todo)} {job.key:55s} {verdict(row):12s} {row['seconds']:6.1f} s  {reason}", flush=True)
    died = [job for job in todo if rows[job.key]["status"] in ("hang", "death") and "dynamo" not in rows[job.key]]
    for job, row in run(died, functools.partial(work, dynamo_only=True), **how):
        keep(job, rows[job.key] | {"dynamo": row.get("dynamo", row.get("status"))})
    return rows


def sampled(todo: Iterable[Job], count: int) -> list[Job]:
    """`count` random jobs of each library, or all if it has fewer; the same in every call."""
    by_library: dict[str, list[Job]] = {}
    for job in todo:
        by_library.setdefault(job.library, []).append(job)
    draw = random.Random(0)
    return [job for group in by_library.values() for job in draw.sample(group, min(count, len(group)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="classes, tasks or libraries to run anew (default: all that have no result yet)")
    parser.add_argument("--sample", type=int, metavar="N", help="of these, N of each library, drawn with a fixed seed")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240, help="for one class")
    parser.add_argument("--results", type=Path, default=Path("runs/coverage.jsonl"))
    parser.add_argument("--table", type=Path, default=Path(__file__).with_name("table.md"))
    options = parser.parse_args()
    if options.fresh:
        options.results.unlink(missing_ok=True)
    for library, remedy in missing().items():
        print(f"{library} is not installed and is left out: {remedy}", file=sys.stderr)
    known = read(options.results)
    todo = [
        j for j in jobs() if {j.key, j.name, j.task, j.library} & set(options.only) or not options.only and j.key not in known
    ]
    if options.sample is not None:
        todo = sampled(todo, options.sample)
    rows = list(collect(todo, options.results, workers=options.workers, seconds=options.seconds).values())
    options.table.write_text(table(rows))
    return 1 if any(verdict(row) == "differs" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
