"""Option sets that are tried: the memory that a step needs with them, exactly, and its seconds in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from l2l_compile.errors import L2LError, OptionError
from l2l_compile.estimate.balanced_stages import ranks_of_names
from l2l_compile.estimate.block_seconds import TimedLowering, timed_lowering
from l2l_compile.estimate.device_memory import room_by_time
from l2l_compile.estimate.optimizer_times import OptimizerTimes, optimizer_times
from l2l_compile.estimate.step_time import RankPrograms, StepTime, times_of_stages, why_not_timed
from l2l_compile.ir.program import Program
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.lanes import OF_DEVICE
from l2l_compile.options import AUTO, Options
from l2l_compile.planner.divisions import rows_of
from l2l_compile.planner.fit import Fit
from l2l_compile.report.explain import Report
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import machine_of_rank

Choice = Mapping[str, Any]  # the options that a planner decides, by name


@dataclass(frozen=True)
class OptionTrial:
    """A step with these options.

    options  those that the planner has decided
    layout   how ranks divide the model
    time     of the rank that bounds the step; None if the step does not fit, or if its options do not go together
    why_not  why they do not go together; "" if they do
    """

    options: Choice
    layout: Layout = field(default_factory=Layout)
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


@dataclass(frozen=True)
class Traces:
    """Traces of a step, anew, by the options: of the whole batch, and of one row (a batch of one row has programs of its own)."""

    of_batch: Callable[[Choice], Report]
    of_row: Callable[[Choice], Report]


class Trials:
    """Tries option sets of one model on one machine, each once.

    given    the options that are not decided
    machine  the whole machine: its devices share the host
    there    rows of the batch that is traced
    rows     of the batch of all ranks
    last     the report of the last step that was tried: its model is that of all; None before the first one
    tokens   of the batch of all ranks; None for a model that takes no tokens, and before the first trial
    """

    def __init__(
        self,
        model: Callable,
        traces: Traces,
        given: Choice,
        machine: Machine,
        there: int,
        rows: int,
        progress: Callable[[str], None],
    ):
        self.given, self.machine, self.there, self.rows, self.progress = given, machine, there, rows, progress
        self._model, self._traces = model, traces
        self._reports: dict[tuple[bool, bool, bool], Report | L2LError] = {}  # by what decides on segments
        self._tried: dict[_Key, OptionTrial] = {}
        self._times: dict[_Key, Sequence[StepTime]] = {}  # of a rank of each stage
        self._ranks: dict[tuple[int, int | None], dict[str, int]] = {}  # of parameters, by depth and loops
        self.last: Report | None = None
        self.tokens: int | None = None
        self._lowering: TimedLowering | None = None
        self._optimizers: dict[bool, OptimizerTimes] = {}  # by whether updates are overlapped, which compiles them

    @property
    def all(self) -> list[OptionTrial]:
        """Everything that was tried, the best first."""
        return sorted(self._tried.values(), key=lambda trial: trial.rank)

    def of(self, layout: Layout, **choice: Any) -> OptionTrial:
        """A step with these options, if ranks divide the model in this way."""
        key = _key(layout, choice)
        if key not in self._tried:
            place = f"{layout}, " if layout.ranks > 1 else ""
            self.progress(f"trying {place}{', '.join(f'{name}={value!r}' for name, value in choice.items())}")
            self._tried[key] = self._try(layout, choice)
        return self._tried[key]

    @functools.cached_property
    def _plain(self) -> Report:
        """The report of a step as `pipeline` asks for it."""
        return self._traces.of_batch({"device": "cpu"})

    @property
    def unsplit(self) -> Program:
        """The program from which `pipeline` finds stages. Raises `L2LError` for a model of several programs."""
        programs = self._plain.programs
        if len(programs) != 1:
            raise L2LError(f"the model is captured as {len(programs)} programs, and a pipeline needs one")
        return programs[0]

    def reports(self, layout: Layout, choice: Choice) -> list[Report]:
        """The report of a rank of each stage. Raises `OptionError` for options that do not go together."""
        options = Options.build({**self.given, **choice, "device": "cpu"})
        rows = rows_of(layout, self.rows)
        if rows is None:
            raise OptionError(f"{self.rows} rows cannot be divided evenly among {layout.batches} ranks with rows of their own")
        report, is_one = self._traced(options, rows == 1, choice), rows == 1
        other = None if is_one or rows == self.there else rows
        return report.of_stages(self._of_each(options, layout, choice), layout, self._ranks_of(layout), self.machine, other)

    def _of_each(self, options: Options, layout: Layout, choice: Choice) -> list[Options]:
        """The options of each stage. What a rank keeps on the host by itself depends on how long it waits for others."""
        if layout.ranks == 1 or options.keep_on_host != AUTO:
            return [options] * layout.depth
        nothing = {**choice, "keep_on_host": 0}
        reports, on = self.reports(layout, nothing), machine_of_rank(self.machine, layout.ranks)
        key = _key(layout, nothing)
        if key not in self._times:
            if not Fit.of_stages(reports, layout, self.machine).fits:  # then a run cannot measure it
                return [options] * layout.depth
            self._time(layout, nothing, reports)
        times = self._times[key]
        rooms = [
            room_by_time(report.programs, report.options, on, time.forward_seconds, time.backward_seconds)
            for report, time in zip(reports, times, strict=True)
        ]
        return [replace(options, keep_on_host=max(1, room)) for room in rooms]  # with 0, the program would keep nothing

    def _traced(self, options: Options, is_one: bool, choice: Choice) -> Report:
        """The report from which those of other options are streamed. Options that decide on segments have traces of their own."""
        splits = options.micro_batches > 1
        key = splits, is_one, options.goes_by_turns
        if key not in self._reports:
            trace = self._traces.of_row if is_one and self.there > 1 else self._traces.of_batch
            try:
                made = trace({**self.given, **choice, "micro_batches": 2 if splits else 1}).on(self.machine)
                if not made.programs:
                    raise L2LError("Dynamo captures no graph of this call, so that nothing of it can be streamed")
                self._reports[key] = made
                if made.tokens is not None:
                    self.tokens = made.tokens * self.rows // (1 if is_one else self.there)
            except L2LError as error:
                self._reports[key] = error
        if isinstance(found := self._reports[key], L2LError):
            raise found
        return found

    def _ranks_of(self, layout: Layout) -> dict[str, int]:
        if layout.depth == 1:
            return {}
        key = layout.depth, layout.loops
        if key not in self._ranks:
            self._ranks[key] = ranks_of_names(self.unsplit, *key)
        _check_trained(self.unsplit, self._ranks[key], layout.depth)
        return self._ranks[key]

    def _try(self, layout: Layout, choice: Choice) -> OptionTrial:
        try:
            reports = self.reports(layout, choice)
            self.last = reports[0]
            fit = Fit.of_stages(reports, layout, self.machine)
        except L2LError as error:
            return OptionTrial(choice, layout, why_not=str(error))
        options = reports[0].options
        if layout.ranks > 1 and (why := why_not_timed(layout, options, self._optimizer(options))):
            return OptionTrial(choice, layout, why_not=why)
        return OptionTrial(choice, layout, fit, self._time(layout, choice, reports) if fit.fits else None)

    def _optimizer(self, options: Options) -> OptimizerTimes:
        overlapped = options.mode.is_overlapped
        if overlapped not in self._optimizers:
            self._optimizers[overlapped] = optimizer_times(self._model, options, self.machine)
        return self._optimizers[overlapped]

    def _time(self, layout: Layout, choice: Choice, reports: Sequence[Report]) -> StepTime:
        options = reports[0].options
        if self._lowering is None:
            self._lowering = timed_lowering(options, self.machine)
        stages = [RankPrograms(report.programs, report.levels, report.host_memory.disk) for report in reports]
        key = _key(layout, choice)
        if key not in self._times:
            self._times[key] = times_of_stages(stages, layout, options, self.machine, self._optimizer(options), self._lowering)
        found = self._times[key]
        return max(found, key=lambda time: (time.seconds, max(map(time.timeline.busy, OF_DEVICE))))


_Key = tuple[Layout, frozenset]


def _key(layout: Layout, choice: Choice) -> _Key:
    return layout, frozenset(choice.items())


def _check_trained(program: Program, rank_of: Mapping[str, int], ranks: int) -> None:
    """Raise `L2LError` if a rank of a pipeline would have nothing to train, which `pipeline` refuses."""
    trained = {
        rank_of[weight.name]
        for segment in program.segments
        for weight, spec in zip(segment.weights, segment.block.weights, strict=True)
        if spec.differentiable and weight.name in rank_of
    }
    if missing := set(range(ranks)) - trained:
        raise L2LError(f"a pipeline of {ranks} ranks would leave {len(missing)} of them nothing to train")
