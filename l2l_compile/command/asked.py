"""What a command is asked: sizes and options of a step, and the reports of this step and of steps that differ from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from l2l_compile.command.failures import failing_as
from l2l_compile.command.models import Workload, check_sizes, load
from l2l_compile.command.quantized_models import QUANTIZED
from l2l_compile.devices.host import HOST
from l2l_compile.errors import L2LError, OptionError
from l2l_compile.options import Options
from l2l_compile.report.explain import Report, explain
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.simulate import simulate
from l2l_compile.simulation.simulated_disk import budget_of
from l2l_compile.update_modes import MODES

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
}
_OPTIONS = (
    *("precision", "gradient_wire", "update", "delay", "accumulate", "max_grad_norm", "compile_update"),
    *("stash", "keep", "keep_on_host", "resident", "prefetch", "outputs", "pinned_memory", "schedule", "disk"),
)
# a step that differs in one of these is traced anew
_TRACED = ("length", "lora", "base", "precision", "outputs", "schedule", "disk")


@dataclass(frozen=True)
class Settings:
    """Sizes and options of a step, as the command line names them; those of `Options` have its names.

    batch   rows; None for a default
    length  tokens of a row; None for a default
    lora    the rank of adapters of a frozen model; None to train all parameters
    base    the dtype of the frozen parameters, with `lora`; "nf4" or "int8" for quantized linear layers
    """

    batch: int | None = None
    length: int | None = None
    lora: int | None = None
    base: str = "bf16"
    micro_batches: int = 8
    precision: str = "bf16"
    gradient_wire: str | None = None
    update: str = "in_forward"
    delay: int = 0
    accumulate: int = 1
    max_grad_norm: float | None = None
    optimizer: str = "adamw"
    compile_update: bool = True
    stash: str = "host"
    keep: str | int = 0
    keep_on_host: str | int = 0
    resident: str | int | None = None
    prefetch: int = 1
    outputs: str = "loss"
    pinned_memory: str | None = None
    schedule: str = "breadth_first"
    disk: str | tuple[str, ...] | None = None

    def options(self, workload: Workload) -> dict[str, Any]:
        """The options of the backend. Raises `OptionError` for values that do not go together."""
        if not workload.trained:
            raise OptionError(f"{workload.name} has no parameter that takes a gradient")
        rows = min(self.batch, workload.rows) if self.batch is not None else workload.rows
        made = self.named(workload) | {"micro_batches": min(self.micro_batches, rows)}
        Options.build({**made, "device": "cpu"})
        return made

    def named(self, workload: Workload) -> dict[str, Any]:
        """The options by their names, for any number of rows."""
        optimizer = OPTIMIZERS[self.optimizer](workload.trained)
        return {name: getattr(self, name) for name in ("micro_batches", *_OPTIONS)} | {"optimizer": optimizer}

    def check(self) -> None:
        """Raise `OptionError` for values that are out of range or do not go together, before a model is built."""
        check_sizes(self.batch, self.length, self.lora)
        if self.base in QUANTIZED and self.lora is None:
            raise OptionError(f"--base {self.base}: quantized weights are not trained, so adapters are needed: --lora RANK")
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        self.options(Workload("a model", torch.nn.ParameterList([parameter]), (torch.empty(10**7, 1, device="meta"),)))

    def flags(self, other: Settings) -> str:
        """The flags that make these settings of others: "--micro-batches 8 --prefetch 0"."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(other, name)}
        several = ((name, value if isinstance(value, tuple) else (value,)) for name, value in changed.items())
        flags = ((f"--{name.replace('_', '-')}", value) for name, values in several for value in values)
        return " ".join(f"without {flag}" if value is None else f"{flag} {value}" for flag, value in flags)


@dataclass
class Asked:
    """A model with the settings of a step. Steps with other settings are traced once, and streamed anew."""

    given: str
    settings: Settings
    machine: Machine | None = None
    _traced: dict[tuple, tuple[Settings, Workload, Report]] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return self._trace(self.settings)[1]

    def workload_of(self, settings: Settings) -> Workload:
        """The model of other settings, with the rows of these settings."""
        workload = self._trace(settings)[1]
        rows = settings.batch
        if rows is None or rows >= workload.rows:
            return workload
        cut = tree_map_only(torch.Tensor, lambda tensor: tensor[:rows] if tensor.dim() else tensor, workload.batch)
        tokens = workload.tokens // workload.rows * rows if workload.tokens is not None else None
        return replace(workload, batch=cut, tokens=tokens)

    @property
    def report(self) -> Report:
        return self.report_of(self.settings)

    def report_of(self, settings: Settings) -> Report:
        """The report of a step with other settings. Raises `OptionError` if they do not go together, or cannot be traced."""
        traced, workload, report = self._trace(settings)
        if settings == traced:
            return report
        rows = min(settings.batch, workload.rows) if settings.batch is not None else workload.rows
        options = Options.build(self._on_machine(settings.options(workload)))
        return self._beside_stashes(report.streamed(options, rows if rows != workload.rows else None))

    def report_of_rows(self, settings: Settings, rows: int) -> Report:
        """The report of a step with another number of rows, which may be more than those that are traced."""
        _, workload, report = self._trace(self.settings)
        return self._beside_stashes(report.streamed(Options.build(self._on_machine(settings.named(workload))), rows))

    def _beside_stashes(self, report: Report) -> Report:
        """The report with what stashes leave of the host's memory for parameters and optimizer state, beside a disk."""
        options, memory = report.options, report.host_memory
        if options.disk is None or options.host_memory is None or self.machine is None:
            return report
        left = self.machine.host_room - memory.stashes - memory.activations
        if left >= options.host_memory:
            return report
        try:
            return report.streamed(replace(options, host_memory=left, device=HOST))
        except L2LError:  # too little: the report says how much is missing
            return report

    def _on_machine(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a report, with the part of the machine's memory that parameters and optimizer state may take beside a disk."""
        made = {**options, "device": "cpu"}
        if options["disk"] is not None and self.machine is not None and MODES[options["update"]].is_overlapped:
            made["host_memory"] = budget_of(self.machine)
        return made

    def _trace(self, settings: Settings) -> tuple[Settings, Workload, Report]:
        """The model and its report, and the settings of the report: those for which it was traced first."""
        splits = settings.micro_batches > 1
        batch = self.settings.batch if splits else settings.batch  # the number of rows is a symbol where rows are split
        key = (*(getattr(settings, name) for name in _TRACED), splits, batch)
        if key not in self._traced:
            workload = load(self.given, batch, settings.length, lora=settings.lora, base=settings.base)
            options = self._on_machine(replace(settings, batch=batch).options(workload))
            with failing_as(f"{workload.name} cannot be traced"):
                report = workload.call(explain(workload.model, options))
            memory = replace(report.host_memory, parameters=workload.parameters)
            report = replace(report, tokens=workload.tokens, model=workload.name, host_memory=memory)
            if self.machine is not None:
                report = self._beside_stashes(report.on(self.machine))
            self._traced[key] = settings, workload, report
        return self._traced[key]

    def simulated(self, machine: Machine, settings: Settings) -> Simulation:
        """A step in virtual time. Raises `OptionError` if the machine lacks a figure for it."""
        workload = self.workload_of(settings)
        with failing_as(f"a step of {workload.name} cannot be simulated"):
            options = settings.options(workload)
            if settings.disk is not None and machine == self.machine and MODES[settings.update].is_overlapped:
                options["host_memory"] = self.report_of(settings).options.host_memory
            return workload.call(simulate(workload.model, machine, options))
