"""`l2l explain`, `l2l simulate`, `l2l coverage`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..devices.machine import Machine, names
from ..errors import L2LError
from ..report import Report, explain
from ..simulation.simulate import simulate
from ..testing import compare
from ..units import format_bytes
from .fit import needs, stashes_on_host
from .models import BATCH, LENGTH, Workload, load
from .tiny import tiny

_OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0, 1 if a model does not fit, fails or differs from eager, 2 for an invalid request."""
    given = parser().parse_args(arguments)
    try:
        return given.run(given)
    except L2LError as error:
        print(f"l2l: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The parser of the commands and their arguments."""
    made = argparse.ArgumentParser(prog="l2l", description="Look at a streamed training step without running it.")
    commands = made.add_subparsers(required=True)
    machines = f"{', '.join(names())}, or the path of a file that measure_machine wrote"

    explained = commands.add_parser("explain", help="what would run, and the memory that it needs")
    _add_step(explained)
    explained.add_argument("--machine", help=f"says whether it fits: {machines}")
    explained.set_defaults(run=_explain)

    simulated = commands.add_parser("simulate", help="how long a step would take on a machine")
    _add_step(simulated)
    simulated.add_argument("--machine", required=True, help=machines)
    simulated.set_defaults(run=_simulate)

    covered = commands.add_parser("coverage", help="one training step of tiny models, streamed and in eager")
    covered.add_argument("name", nargs="+", help="a class of transformers, such as BertForMaskedLM, or package.module:function")
    covered.set_defaults(run=_coverage)
    return made


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", help="a Hugging Face folder or config.json, or package.module:function that returns a model and its batch"
    )
    parser.add_argument("--batch", type=int, help=f"rows of the batch (default: {BATCH})")
    parser.add_argument("--length", type=int, help=f"tokens of a row (default: {LENGTH})")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--update", default="in_forward", choices=("at_step", "in_backward", "in_forward"))
    parser.add_argument("--optimizer", default="adamw", choices=sorted(_OPTIMIZERS))
    parser.add_argument("--stash", default="host", choices=("host", "device"))
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--outputs", default="loss", choices=("all", "loss"))
    parser.add_argument("--html", metavar="FILE", help="write the page with pictures")


def _options(given: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    names = ("precision", "update", "stash", "prefetch", "outputs")
    chosen = {name: getattr(given, name) for name in names}
    optimizer = _OPTIMIZERS[given.optimizer](workload.model.parameters())
    return {**chosen, "micro_batches": min(given.micro_batches, workload.rows), "optimizer": optimizer}


def _headline(workload: Workload) -> str:
    rows, parameters = workload.rows, workload.parameters
    size = f"{rows} x {workload.tokens // rows} tokens" if workload.tokens is not None else f"{rows} rows"
    return f"{workload.name}: {_count(parameters)} parameters, a batch of {size}"


def _count(number: int) -> str:
    """70.6 billion, 1.5 million, 144."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


@dataclass(frozen=True)
class _Asked:
    """A workload with the options of the command line, and its report."""

    workload: Workload
    options: dict[str, Any]

    @classmethod
    def of(cls, given: argparse.Namespace) -> _Asked:
        workload = load(given.config, given.batch, given.length)
        return cls(workload, _options(given, workload))

    @functools.cached_property
    def report(self) -> Report:
        return self._explain(self.options)

    def with_micro_batches(self, count: int) -> Report:
        return self._explain({**self.options, "micro_batches": count})

    def _explain(self, options: dict[str, Any]) -> Report:
        return self.workload.call(explain(self.workload.model, {**options, "device": "cpu"}))


def _explain(given: argparse.Namespace) -> int:
    machine = Machine.load(given.machine) if given.machine else None
    asked = _Asked.of(given)
    report = asked.report
    print(_headline(asked.workload))
    fits = _print_needs(asked, machine) if machine is not None else True
    _save_page(given, report)
    print(f"\n{report}\nhost memory for stashes: {format_bytes(stashes_on_host(report))}")
    return 0 if fits else 1


def _save_page(given: argparse.Namespace, report: Report) -> None:
    if given.html:
        report.save(given.html, given.machine or "h200")


def _print_needs(asked: _Asked, machine: Machine) -> bool:
    print(f"on {machine.name}:")
    found = needs(asked.report, machine, asked.with_micro_batches)
    for need in found:
        print("  " + str(need).replace("\n", "\n  "))
    return all(need.fits for need in found)


def _simulate(given: argparse.Namespace) -> int:
    machine = Machine.load(given.machine)
    asked = _Asked.of(given)
    workload, report = asked.workload, asked.report
    print(_headline(workload))
    fits = _print_needs(asked, machine)
    step = workload.call(simulate(workload.model, machine, asked.options))
    rate = f", {workload.tokens / step.seconds:,.0f} tokens/s" if workload.tokens is not None else ""
    print(f"  {step.seconds:.3g} s a step{rate}")
    _save_page(given, report)
    print(f"\n{report.host_memory}\nhost memory for stashes: {format_bytes(stashes_on_host(report))}\n\n{step}")
    return 0 if fits else 1


def _coverage(given: argparse.Namespace) -> int:
    differ = 0
    for name in given.name:
        try:
            workload = tiny(name)
            found = workload.call(compare(workload.model, {"micro_batches": 2, "block_compiler": "eager", "device": "cpu"}))
        except Exception as error:  # noqa: BLE001 - one class fails; the next classes still run
            differ += 1
            print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            continue
        differ += not found.passes
        print(f"{name}: {str(found).splitlines()[0]}")
    return 1 if differ else 0
