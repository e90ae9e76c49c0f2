"""`l2l explain`, `l2l simulate`, `l2l plan`, `l2l coverage`, `l2l machines`, `l2l cache`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from l2l_compile.command import arguments
from l2l_compile.command.asked import Asked, Settings
from l2l_compile.command.cache import cache
from l2l_compile.command.failures import failing_as, said
from l2l_compile.command.models import Workload
from l2l_compile.command.planning import planned
from l2l_compile.command.progress import Progress, progress
from l2l_compile.command.remedies import Remedies
from l2l_compile.command.speed import Plain, lanes_of, speed_of
from l2l_compile.command.tiny import tiny
from l2l_compile.errors import L2LError, OptionError
from l2l_compile.planner.fit import Fit
from l2l_compile.report.explain import Report
from l2l_compile.report.report_text import paragraphs
from l2l_compile.simulation.machine import Machine, names
from l2l_compile.simulation.result import Simulation
from l2l_compile.testing import compare
from l2l_compile.units import format_bytes, format_count

_TALKATIVE = ("torchao", "torch.utils._pytree")  # warn of themselves when PEFT or transformers imports torchao


def main(given: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0, 1 if a model does not fit, fails or differs from eager, 2 for an invalid request."""
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        chosen = parser().parse_args(given)
        status = chosen.run(chosen)
        sys.stdout.flush()
        return status
    except L2LError as error:
        print(f"l2l: {_in_a_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `l2l explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("l2l: interrupted", file=sys.stderr)
        return 130


def _in_a_line(text: str) -> str:
    """A text without line breaks; the middle of a word that no reader wants whole is left out."""
    return re.sub(r"\S{200,}", lambda word: f"{word[0][:80]}…{word[0][-20:]}", " ".join(text.split()))


def parser() -> argparse.ArgumentParser:
    """The parser of the commands and their arguments."""
    return arguments.parser(
        {
            "explain": _explain,
            "simulate": _simulate,
            "plan": planned,
            "coverage": _coverage,
            "machines": _machines,
            "cache": cache,
        }
    )


def _explain(given: argparse.Namespace) -> int:
    asked = _asked(given)
    with progress() as under_way:
        under_way(f"tracing {given.config}")
        report = asked.report
        print(_headline(asked.workload))
        fits = _fitting(asked, under_way) == asked.settings if asked.machine is not None else True
        under_way("simulating a step for the page")
        _save_page(given, asked, report)
    print(f"\n{report}")
    return 0 if fits else 1


def _simulate(given: argparse.Namespace) -> int:
    """The step that is asked for, or the first one that fits; the text with `--generate`."""
    if given.generate is not None:
        return _generate(given)
    asked = _asked(given)
    assert asked.machine is not None
    with progress() as under_way:
        under_way(f"tracing {given.config}")
        print(_headline(asked.workload))
        fitting = _fitting(asked, under_way)
        under_way("simulating a step")
        shown = fitting or asked.settings
        workload, report = asked.workload_of(shown), asked.report_of(shown)
        step = asked.simulated(asked.machine, shown)
        under_way("writing the page")
        _save_page(given, asked, replace(report, simulated=lambda _: step))
    _print_speed(step, report, workload, _condition(fitting, asked))
    kept = f"{report.kept}\n" if report.kept is not None else ""
    print("\n" + "\n".join(paragraphs(f"{report.device_memory}\n{kept}{report.host_memory}")))
    print("\nlanes at work in a step:\n" + "\n".join(lanes_of(step, report.options)))
    return 0 if fitting == asked.settings else 1


def _generate(given: argparse.Namespace) -> int:
    generation, machine = arguments.generation_of(given), arguments.machine_of(given)
    assert machine is not None
    with progress() as under_way:
        text = generation.on(machine, under_way)
    print(text)
    return 0 if text.fits else 1


def _condition(fitting: Settings | None, asked: Asked) -> str:
    """The step that the figures of speed are of, if it is not the one that is asked for on this machine."""
    if fitting is None:
        return " with the memory for it"
    return "" if fitting == asked.settings else f" with {fitting.flags(asked.settings)}"


def _asked(given: argparse.Namespace) -> Asked:
    """The request, with all that can be checked before a model is built."""
    settings, machine = arguments.settings_of(given), arguments.machine_of(given)
    if given.html is not None:
        _check_writable(given.html)
    return Asked(given.config, settings, machine)


def _check_writable(file: str) -> None:
    """Raise `OptionError` if a file cannot be written: before the work, not after it."""
    try:
        existed = Path(file).exists()
        with open(file, "a"):
            pass
        if not existed:
            Path(file).unlink()
    except (OSError, ValueError) as error:
        raise OptionError(f"--html {file!r:.200} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _save_page(given: argparse.Namespace, asked: Asked, report: Report) -> None:
    if given.html is None:
        return
    machine = asked.machine if asked.machine is not None else Machine.load("h200")
    try:
        with failing_as("the page cannot be made"):
            page = report.page(machine)
        Path(given.html).write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html {given.html!r} cannot be written: {error.strerror}") from error


def _headline(workload: Workload) -> str:
    rows, parameters, trained = workload.rows, workload.parameters, sum(p.numel() for p in workload.trained)
    size = f"{rows} x {workload.tokens // rows} tokens" if workload.tokens is not None else f"{rows} rows"
    of_them = "" if trained == parameters else f", {format_count(trained)} of them trained"
    return f"{workload.name}: {format_count(parameters)} parameters{of_them}, a batch of {size}"


def _fitting(asked: Asked, under_way: Progress) -> Settings | None:
    """Print whether the step fits on the machine, else the changes with which it fits, or which come nearest.

    Returns the settings that fit: those asked for, or those of the first change. None if nothing fits.
    """
    machine = asked.machine
    assert machine is not None
    fit = Fit.of(asked.report, machine)
    print(f"on {machine.name}:")
    for need in fit.needs:
        print(f"  {need}")
    if fit.fits:
        return asked.settings
    found, nearest = Remedies(asked, under_way).found()
    if found:
        print("  it fits with one of these, each computed like the lines above:" if len(found) > 1 else "  it fits with:")
    elif nearest.settings == asked.settings:
        print("  no change of options makes it fit: a machine with more memory, or a smaller model")
    else:
        print("  no change of options that was tried makes it fit; the nearest:")
    for trial in found or [nearest] * (nearest.settings != asked.settings):
        print(f"    {trial.told(asked)}")
    return found[0].settings if found else None


def _print_speed(step: Simulation, report: Report, workload: Workload, condition: str) -> None:
    print(f"  speed{condition}: {speed_of(step, workload)}")
    if not step.steady:
        print("  no two simulated steps in a row took as long: this is the last one")
    if step.machine.overlaps:
        plain = Plain.of(report, workload)
        print(f"  {plain.told(step.machine.device_room)}")
        print(f"  {plain.compared(step)}")


def _machines(given: argparse.Namespace) -> int:
    rows = [("machine", "device memory", "host memory", "bf16 or fp16", "to the device", "name")]
    for name in names():
        machine = Machine.load(name)
        flops = machine.flops.get("bfloat16", machine.flops.get("float16", 0.0))
        memory = (format_bytes(int(machine.device_memory)), format_bytes(int(machine.host_memory)))
        rows.append((name, *memory, f"{flops / 1e12:.4g} TFLOP/s", f"{machine.h2d / 1e9:.3g} GB/s", machine.name))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    return 0


def _coverage(given: argparse.Namespace) -> int:
    differ = 0
    for name in given.name:
        try:
            workload = tiny(name)
            found = workload.call(compare(workload.model, {"micro_batches": 2, "block_compiler": "eager", "device": "cpu"}))
        except Exception as error:  # noqa: BLE001 - one class fails; the next classes still run
            differ += 1
            print(f"{name}: {said(error)}")
            continue
        differ += not found.passes
        print(f"{name}: {str(found).splitlines()[0]}")
    return 1 if differ else 0
