"""`l2l plan`: the options with which a step is fastest on a machine, or the most rows that fit there."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from l2l_compile.command import arguments
from l2l_compile.command.asked import OPTIMIZERS, Asked, Settings
from l2l_compile.command.failures import failing_as
from l2l_compile.command.models import load
from l2l_compile.command.progress import Progress, progress
from l2l_compile.command.remedies import Remedies
from l2l_compile.errors import OptionError
from l2l_compile.planner.fit import Fit
from l2l_compile.planner.most_rows import most_rows
from l2l_compile.planner.plan import Plans, plan
from l2l_compile.planner.search import DECIDED, modes_with
from l2l_compile.simulation.machine import Machine
from l2l_compile.update_modes import MODES

_NOT_DECIDED = ("precision", "gradient_wire", "accumulate", "max_grad_norm", "compile_update", "outputs", "disk")
_LEAST = 2  # rows: with fewer, a batch is not split
_SLICES = 256  # micro-batches, with which the most rows are looked for
_FRUGAL: dict[str, Any] = {"prefetch": 0, "keep": 0, "keep_on_host": 0, "resident": None}


def planned(given: argparse.Namespace) -> int:
    """Exit status 1 if nothing fits."""
    (settings, fixed), machine = arguments.request_of(given), arguments.machine_of(given)
    assert machine is not None
    with progress() as under_way:
        under_way(f"tracing {given.config}")
        if given.batch is None:
            if given.devices > 1:
                raise OptionError(
                    "the most rows are told for one device: with --devices, give --rows, those of all devices together"
                )
            return _rows(given.config, settings, fixed, machine, under_way)
        found = _plan(given, settings, fixed, machine, under_way)
        print(found)
        if found.plans:
            print(f"\n{found.best.code}")
            return 0
        if given.devices == 1:
            _tell_remedies(Asked(given.config, _nearest(settings, found), machine), under_way)
        elif lacking := found.lacking:
            print(
                f"  it fits with {' and '.join(f'--{name}-memory {math.ceil(size / 1e9)}GB' for name, size in lacking.items())}"
            )
    return 1


def _plan(given: argparse.Namespace, settings: Settings, fixed: dict[str, Any], machine: Machine, under_way: Progress) -> Plans:
    workload = load(given.config, settings.batch, settings.length, lora=settings.lora, base=settings.base)
    if not workload.trained:
        raise OptionError(f"{workload.name} has no parameter that takes a gradient")
    chosen = {name: getattr(settings, name) for name in _NOT_DECIDED} | fixed
    optimizer = OPTIMIZERS[settings.optimizer](workload.trained)
    with failing_as(f"{workload.name} cannot be planned"):
        ask = plan(
            workload.model,
            machine,
            chosen,
            optimizer=optimizer,
            devices=given.devices,
            hosts=given.hosts,
            delay=given.delay,
            progress=under_way,
        )
        return workload.call(ask)


def _rows(config: str, settings: Settings, fixed: dict[str, Any], machine: Machine, under_way: Progress) -> int:
    """Print the most rows that fit, and what the next one lacks."""
    modes = modes_with({name: getattr(settings, name) for name in _NOT_DECIDED} | {"optimizer": settings.optimizer} | fixed)
    mode = next((mode for mode in modes if MODES[mode].is_overlapped and not MODES[mode].keeps_gradients), modes[-1])
    frugal = replace(settings, **{**_FRUGAL, "update": mode, **fixed})
    asked = Asked(config, replace(frugal, batch=_LEAST, micro_batches=_LEAST), machine)

    def slices(rows: int) -> int:
        return fixed.get("micro_batches", min(rows, _SLICES))

    def fit_with(rows: int, stash: str) -> Fit:
        tried = replace(frugal, batch=rows, micro_batches=slices(rows), stash=stash)
        return Fit.of(asked.report_of_rows(tried, rows), machine)

    def fit_of(rows: int) -> Fit:
        """The best one of stashes on the host, on the device and, if there is one, on the disk."""
        under_way(f"trying {rows} rows")
        places = [fixed["stash"]] if "stash" in fixed else ["host", "device", *(["disk"] if settings.disk is not None else [])]
        return min((fit_with(rows, stash) for stash in places), key=lambda fit: fit.excess)

    most = most_rows(fit_of, _LEAST)
    length = f" of {asked.workload.tokens // asked.workload.rows} tokens" if asked.workload.tokens is not None else ""
    lacking = "\n".join(f"  {need}" for need in fit_of(most + 1 if most else _LEAST).needs)
    if not most:
        print(f"on {machine.name}: not even {_LEAST} rows{length} fit:\n{lacking}")
        _tell_remedies(asked, under_way)
        return 1
    print(f"on {machine.name}: at most {most:,} rows{length} fit, in {slices(most)} micro-batches. With one row more:\n{lacking}")
    print(f"l2l plan {config} --rows N plans the steps of N rows")
    return 0


def _nearest(settings: Settings, found: Plans) -> Settings:
    nearest = found.nearest
    return replace(settings, **{n: v for n, v in nearest.options.items() if n in DECIDED}) if nearest is not None else settings


def _tell_remedies(asked: Asked, under_way: Progress) -> None:
    """Print the changes of the training with which a step fits, or which come nearest."""
    fitting, nearest = Remedies(asked, under_way).found()
    print("  it fits with one of these:" if fitting else "  no change that was tried makes it fit; the nearest:")
    for trial in fitting or [nearest]:
        print(f"    {trial.told(asked)}")
