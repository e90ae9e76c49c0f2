"""Option sets that are tried: the memory that a step needs with them, exactly, and its seconds in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from l2l_compile.errors import L2LError
from l2l_compile.estimate.block_seconds import TimedLowering, timed_lowering
from l2l_compile.estimate.optimizer_times import OptimizerTimes, optimizer_times
from l2l_compile.estimate.step_time import StepTime, step_time
from l2l_compile.options import Options
from l2l_compile.planner.fit import Fit
from l2l_compile.report.explain import Report
from l2l_compile.simulation.machine import Machine

Choice = Mapping[str, Any]  # the options that a planner decides, by name


@dataclass(frozen=True)
class OptionTrial:
    """A step with these options.

    options  those that the planner has decided
    time     None if the step does not fit, or if its options do not go together
    why_not  why they do not go together; "" if they do
    """

    options: Choice
    fit: Fit | None = None
    time: StepTime | None = None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        return self.time is not None

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite for one that does not fit."""
        return self.time.seconds if self.time is not None else float("inf")

    @property
    def rank(self) -> tuple[float, float]:
        """Of two trials, the better one has the smaller rank: bytes that it has too much, and seconds."""
        return float(self.fit.excess) if self.fit is not None else float("inf"), self.seconds


class Trials:
    """Tries option sets of one model on one machine, each once.

    trace  gives the report of a step with these options, traced anew
    given  the options that are not decided
    rows   of the batch; None for those that were traced
    last   the report of the last step that was tried: its model and batch are those of all; None before the first one
    """

    def __init__(
        self,
        model: Callable,
        trace: Callable[[Choice], Report],
        given: Choice,
        machine: Machine,
        rows: int | None,
        progress: Callable[[str], None],
    ):
        self.given, self.machine, self.rows, self.progress = given, machine, rows, progress
        self._model, self._trace = model, trace
        self._reports: dict[bool, Report] = {}  # by whether the batch is split
        self._tried: dict[frozenset, OptionTrial] = {}
        self.last: Report | None = None
        self._lowering: TimedLowering | None = None
        self._optimizers: dict[bool, OptimizerTimes] = {}  # by whether updates are overlapped, which compiles them

    @property
    def all(self) -> list[OptionTrial]:
        """Everything that was tried, the best first."""
        return sorted(self._tried.values(), key=lambda trial: trial.rank)

    def of(self, **choice: Any) -> OptionTrial:
        """A step with these options."""
        key = frozenset(choice.items())
        if key not in self._tried:
            self.progress(f"trying {', '.join(f'{name}={value!r}' for name, value in choice.items())}")
            self._tried[key] = self._try(choice)
        return self._tried[key]

    def report(self, choice: Choice) -> Report:
        """The report of a step with these options. Raises `OptionError` for options that do not go together."""
        options = Options.build({**self.given, **choice, "device": "cpu"})
        splits = options.micro_batches > 1
        if splits not in self._reports:
            self._reports[splits] = self._trace({**self.given, **choice, "micro_batches": 2 if splits else 1}).on(self.machine)
        return self._reports[splits].streamed(options, self.rows if splits else None)

    def _try(self, choice: Choice) -> OptionTrial:
        try:
            self.last = report = self.report(choice)
            fit = Fit.of(report, self.machine)
        except L2LError as error:
            return OptionTrial(choice, why_not=str(error))
        return OptionTrial(choice, fit, self._time(report) if fit.fits else None)

    def _time(self, report: Report) -> StepTime:
        options, overlapped = report.options, report.options.mode.is_overlapped
        if self._lowering is None:
            self._lowering = timed_lowering(options, self.machine)
        if overlapped not in self._optimizers:
            self._optimizers[overlapped] = optimizer_times(self._model, options, self.machine)
        return step_time(report.programs, options, self.machine, report.levels, self._optimizers[overlapped], self._lowering)
