"""Which models of transformers train with `torch.compile(model, backend="l2l")`, and how? A table of every class.

    python examples/coverage.py                       # continues where it was stopped
    python examples/coverage.py --fresh               # all anew: an hour on two cores
    python examples/coverage.py BertForMaskedLM CTC   # these classes and tasks anew, the others as they were

A tiny model of each class (see `tiny_models.py`) trains one step eager and one with l2l, in float64, or in float32
where a kernel of the model lacks float64; loss and gradients are compared. Where they differ or l2l fails, a step with
`torch.compile(backend="eager")` tells whether Dynamo does so too. A class that crashes or hangs costs a worker process
and no more. Results go to `runs/coverage.jsonl` as they come, the table to `examples/coverage.md`.
"""
from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage_table import SPLIT, table, verdict
from tiny_models import SETTINGS, Job, batch, build, jobs
from torch import nn
from torch.utils._pytree import tree_leaves
from workers import run

import l2l_compile
import l2l_compile.passes
from l2l_compile.errors import L2LError

Result = dict[str, Any]
Gradients = dict[str, torch.Tensor | None]
Step = tuple[torch.Tensor, Gradients]  # loss, and the gradient of each parameter

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # norm-wise, relative
SCATTER = 4  # an error up to so many times what rounding is seen to make is rounding
OPTIONS = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu"}
OURS = (*l2l_compile.__path__, *l2l_compile.passes.__path__)
NO_BATCH = "it reads and makes no batched value"  # such a segment has nothing to split


# ---- one class -------------------------------------------------------------------------------------------------------


def check(job: Job, dynamo_only: bool = False) -> Result:
    """The row of one class. `dynamo_only` leaves l2l out, for a class that killed its worker."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.collect()
    with warnings.catch_warnings(action="ignore"):
        trained = trains_eagerly(job)
        if isinstance(trained, str):
            return {"status": "eager fails", "reason": trained}
        model, inputs, setting, expected = trained
        reordered = train(copy.deepcopy(model), {name: value.flip(0) for name, value in inputs.items()})
        row = {"setting": setting, "dtype": str(dtype_of(expected)).removeprefix("torch.")}
        if error_of(expected, train(copy.deepcopy(model), inputs, seed=1), reordered)[0] > 1e-9:
            return row | {"status": "random", "reason": "another seed gives another step"}
        if not dynamo_only:
            row |= compiled_step(model, inputs, expected, reordered, "l2l", OPTIONS)
        if row.get("status") != "parity":
            dynamo = compiled_step(model, inputs, expected, reordered, "eager", None)
            row["dynamo"] = " ".join((dynamo["status"], dynamo["reason"])).strip()
    return row


def trains_eagerly(job: Job) -> tuple[nn.Module, dict[str, torch.Tensor], str, Step] | str:
    """Model, inputs, the name of the setting, and a step of the first setting that trains; else what went wrong first."""
    problem = ""
    for setting in SETTINGS:
        for dtype in TOLERANCE:
            try:
                model = build(job, setting)
                inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch(model, job, setting).items()}
                model = model.to(dtype)
                step = train(copy.deepcopy(model), inputs)
                if not torch.isfinite(step[0]):
                    raise ArithmeticError(f"the loss is {step[0].item()}")
                return model, inputs, setting.name, step
            except Exception as error:  # noqa: BLE001 - the next setting may do
                problem = problem or describe(error)
                if not isinstance(error, RuntimeError | ArithmeticError):
                    break  # another dtype does not mend it
    return problem


def compiled_step(model: nn.Module, inputs: dict, expected: Step, reordered: Step, backend: str, options: dict | None) -> Result:
    """Status and reason of a step with this backend, and what l2l made of the model."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, options=options)
    try:
        step = train(model, inputs, run=compiled)
    except Exception as error:  # noqa: BLE001 - any failure is a row of the table
        return {"status": "refused" if isinstance(error, L2LError) else "crash", "reason": describe(error)}
    error, where = error_of(expected, step, reordered)
    row = {"status": "parity", "reason": ""}
    if not error <= TOLERANCE[dtype_of(expected)]:
        row = {"status": "differs", "reason": f"{where} by {error:.1e}"}
    return {**row, **shape_of(model, compiled, step[1]), "error": error} if backend == "l2l" else row


def dtype_of(step: Step) -> torch.dtype:
    """The narrowest dtype of the loss and the gradients: some models keep parameters in float32, such as those of routers."""
    return min((t.dtype for t in (step[0], *step[1].values()) if t is not None), key=lambda dtype: dtype.itemsize)


def train(model: nn.Module, inputs: dict, seed: int = 0, run: Callable | None = None) -> Step:
    """One training step, of the model itself or as `run` compiles it."""
    torch.manual_seed(seed)
    outputs = (model if run is None else run)(**inputs)
    loss = getattr(outputs, "loss", None)
    if loss is None:  # a number that all outputs decide
        loss = sum((t * t).mean() for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def error_of(expected: Step, step: Step, reordered: Step) -> tuple[float, str]:
    """The largest norm-wise error of loss and gradients, and whose it is; infinite where one is missing or extra.

    Where terms cancel (in the gradient of the bias of keys in an attention, say), no digits are left to compare: an error within
    the rounding of the largest gradient, or like the one that eager makes in a step on the same rows in reverse order, is
    taken relative to the largest gradient.
    """
    largest = max((g.norm().item() for g in expected[1].values() if g is not None), default=0.0)
    errors = [(distance(step[0], expected[0]), "loss")]
    for name, gradient in expected[1].items():
        made = step[1][name]
        if (gradient is None) != (made is None):
            errors.append((float("inf"), f"gradient of {name} ({'missing' if made is None else 'extra'})"))
        elif gradient is not None:
            rounding = max((reordered[1][name] - gradient).norm().item(), torch.finfo(gradient.dtype).eps * largest)
            is_rounding = (made - gradient).norm() <= SCATTER * rounding
            errors.append((distance(made, gradient, largest if is_rounding else None), f"gradient of {name}"))
    return max(errors)


def distance(made: torch.Tensor, expected: torch.Tensor, scale: float | None = None) -> float:
    """The norm of the error relative to that of what is expected, or to `scale`; absolute where that is zero; infinite for NaN."""
    error, scale = (made - expected).norm().item(), expected.norm().item() if scale is None else scale
    error = error / scale if scale else error
    return error if error == error else float("inf")


def describe(error: BaseException) -> str:
    """Type and beginning of an error, and where in this project it was raised, or else where at all."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if f.filename.startswith(OURS)), frames[-1])
    error = getattr(error, "inner_exception", error)  # of what Dynamo wraps
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]} ({Path(frame.filename).name}:{frame.lineno})"


# ---- what was compiled -----------------------------------------------------------------------------------------------


def shape_of(model: nn.Module, compiled: nn.Module, gradients: Gradients) -> Result:
    """Programs, segments, repeats and stacks of a compiled model, and the reasons of what runs whole-batch."""
    programs = l2l_compile.programs(compiled)
    segments = [s for p in programs for s in p.segments]
    held = [names for p in programs for names in parameters_of(p, list(gradients))]
    whole = Counter(s.block.reason for s in segments if not s.block.inner_looped)
    return {
        "programs": len(programs),
        "breaks": sorted({p.break_reason for p in programs if p.break_reason}),
        "segments": len(segments),
        "repeats": max((s.block.repeats for s in segments), default=0),
        "whole": {reason: count for reason, count in whole.items() if reason != NO_BATCH},
        "stacks": {name: granularity(layers, held, gradients) for name, layers in stacks(model)},
    }


def parameters_of(program: l2l_compile.Program, names: list[str]) -> Iterator[set[str]]:
    """The parameters of each segment by their names in the model.

    After a graph break, a program names them from the module whose `forward` it is: where that may be several modules
    (each layer is captured for itself, say), the segment is taken for each in turn.
    """
    roots: set[str] | None = None
    for name in {n for s in program.segments for n in s.parameter_names}:
        ends = {full.removesuffix(name) for full in names if f".{full}".endswith(f".{name}")}
        if ends:  # a tied parameter may have a name that `named_parameters` leaves out
            roots = ends if roots is None else roots & ends
    for root in roots or ():
        yield from ({root + name for name in s.parameter_names} for s in program.segments)


def stacks(model: nn.Module) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """The outermost lists of at least two layers of one class: name, and the names of the parameters of each layer.

    A layer is made of other modules; two plain `Linear`s one after the other are no stack.
    """
    inside: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or name.startswith(tuple(inside)):
            continue
        layers = {f"{name}.{child}": layer for child, layer in module.named_children()
                  if next(layer.children(), None) is not None and next(layer.parameters(), None) is not None}
        if max(Counter(map(type, layers.values())).values(), default=0) > 1:
            inside.append(f"{name}.")
            yield name, {n: {f"{n}.{p}" for p, _ in layer.named_parameters()} for n, layer in layers.items()}


def granularity(layers: dict[str, set[str]], held: list[set[str]], gradients: Gradients) -> str:
    """`SPLIT`, or what keeps a stack from being streamed layer by layer. `held`: the parameters of each segment."""
    owner = {parameter: layer for layer, parameters in layers.items() for parameter in parameters}
    owners = [{owner[p] for p in names if p in owner} for names in held]
    most = max(map(len, owners), default=0)
    if most > 1:
        return f"a segment holds {most} of {len(layers)} layers"
    lost = {owner[p] for p in owner if gradients.get(p) is not None} - set().union(*owners)
    return f"{len(lost)} of {len(layers)} layers are in no segment" if lost else SPLIT


# ---- all classes -----------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Result]:
    """The rows so far by class, the last one of each; a line that a kill cut off is left out."""
    rows: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["name"]] = row
    return rows


def collect(todo: list, path: Path, work: Callable[..., Result] = check, **how: Any) -> dict[str, Result]:
    """Do jobs, append each row to the file as it comes, and return all rows of the file. `how` goes to `workers.run`."""
    rows = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(job: Job, row: Result) -> None:
        rows[job.name] = {"name": job.name, "task": job.task, **row}
        with path.open("a") as file:
            file.write("\n" + json.dumps(rows[job.name]))  # on a new line, whatever a kill left of the last one

    for number, (job, row) in enumerate(run(todo, work, **how), 1):
        keep(job, row)
        reason = row.get("reason", "")[:150]
        print(f"{number:3d}/{len(todo)} {job.name:45s} {verdict(row):12s} {row['seconds']:6.1f} s  {reason}", flush=True)
    died = [job for job in todo if rows[job.name]["status"] in ("hang", "death") and "dynamo" not in rows[job.name]]
    for job, row in run(died, functools.partial(work, dynamo_only=True), **how):
        keep(job, rows[job.name] | {"dynamo": row.get("dynamo", row.get("status"))})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="classes or tasks to run anew (default: all that have no result yet)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180, help="for one class")
    parser.add_argument("--results", type=Path, default=Path("runs/coverage.jsonl"))
    parser.add_argument("--table", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    if options.fresh:
        options.results.unlink(missing_ok=True)
    known = read(options.results)
    todo = [j for j in jobs() if ({j.name, j.task} & set(options.only) if options.only else j.name not in known)]
    rows = list(collect(todo, options.results, workers=options.workers, seconds=options.seconds).values())
    options.table.write_text(table(rows))
    return 1 if any(verdict(row) == "differs" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
