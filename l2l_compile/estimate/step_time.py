"""The time of a training step on a machine, by an interpreter over program nodes, on sizes alone (`program_times.py`).

It gives the work of each node to the clocks of lanes and threads, as the executor does in `simulate`, and computes no tensors. So a
step takes milliseconds to time where `simulate` takes seconds. Of ranks that do the same, one is timed; of a pipeline, all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from l2l_compile.errors import OptionError
from l2l_compile.estimate.block_seconds import TimedLowering, timed_lowering
from l2l_compile.estimate.device_memory import StepLevels
from l2l_compile.estimate.host_times import HostTimes
from l2l_compile.estimate.optimizer_times import OptimizerTimes
from l2l_compile.estimate.program_times import ProgramTimer
from l2l_compile.estimate.rank_links import links_of
from l2l_compile.estimate.stash_times import StashTimes
from l2l_compile.estimate.without_flush_times import HostTimesWithoutFlush
from l2l_compile.host.disk_plan import DiskPlan
from l2l_compile.ir.program import Program
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.options import Options
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import machine_of_rank
from l2l_compile.simulation.simulated_device import Clocks, SimulatedLane
from l2l_compile.simulation.simulated_disk import check_is_timed
from l2l_compile.simulation.simulated_pipeline import Messages
from l2l_compile.timeline import Timeline

_MOST_STEPS = 6


@dataclass(frozen=True)
class StepTime:
    """A step in virtual time: the work of each lane and thread of a rank, and whether the step before took as long.

    forward_seconds, backward_seconds  of the calls of the model and of `loss.backward()`, with all that the caller waits for there
    """

    timeline: Timeline
    steady: bool
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.timeline.seconds


@dataclass(frozen=True)
class RankPrograms:
    """The programs of a rank, what their segments keep for backward, and what is on disk; None for nothing."""

    programs: Sequence[Program]
    levels: StepLevels | None = None
    disk: DiskPlan | None = None


def step_time(
    programs: Sequence[Program],
    options: Options,
    machine: Machine,
    levels: StepLevels | None,
    optimizer: OptimizerTimes,
    lowering: TimedLowering | None = None,
    disk: DiskPlan | None = None,
) -> StepTime:
    """Time steps of one rank through these programs until two take equally long. As `times_of_stages`."""
    (found,) = times_of_stages([RankPrograms(programs, levels, disk)], Layout(), options, machine, optimizer, lowering)
    return found


def times_of_stages(
    stages: Sequence[RankPrograms],
    layout: Layout,
    options: Options,
    machine: Machine,
    optimizer: OptimizerTimes,
    lowering: TimedLowering | None = None,
) -> list[StepTime]:
    """Time steps of a rank of each stage until two take equally long. Without a pipeline, there is one stage.

    machine   the whole machine: its devices share the host
    lowering  has the blocks that were timed before; None for a new one

    Raises `OptionError` for a step that it cannot time, and for a figure that the machine lacks.
    """
    _check(stages, layout, options, optimizer)
    lowering = lowering or timed_lowering(options, machine)
    messages = Messages(machine, layout.stages) if layout.depth > 1 else None
    timers = [
        _StepTimer(rank, number, layout, options, machine, messages, optimizer, lowering) for number, rank in enumerate(stages)
    ]
    if messages is None:
        return [timer.time() for timer in timers]
    return messages.turns.run([timer.time for timer in timers])


def why_not_timed(layout: Layout, options: Options, optimizer: OptimizerTimes) -> str:
    """Why steps of ranks that divide a model in this way are not timed by their nodes; "" if they are."""
    if layout.ranks == 1 or options.optimizer is None:
        return ""
    if not options.mode.is_overlapped:
        return "a step of several ranks with update='at_step' is not timed by its nodes"
    if layout.shards > 1 and optimizer.state is None:
        return f"updates of shards by the own step of {type(options.optimizer).__name__} are not timed by the nodes of a step"
    return ""


def _check(stages: Sequence[RankPrograms], layout: Layout, options: Options, optimizer: OptimizerTimes) -> None:
    programs = [program for rank in stages for program in rank.programs]
    of_several = any(program.captured.mesh is not None or program.captured.owners is not None for program in programs)
    if of_several and layout.ranks == 1:
        raise OptionError("a step of several ranks is not timed by the nodes of one: simulate it")
    if why := why_not_timed(layout, options, optimizer):
        raise OptionError(f"{why}: simulate it")
    if options.pinned_memory is not None:
        raise OptionError("a step with a limit for page-locked memory is not timed by its nodes: simulate it")


class _StepTimer:
    """Times the steps of a rank: forwards of its programs in order, and backwards in reverse."""

    def __init__(
        self,
        rank: RankPrograms,
        stage: int,
        layout: Layout,
        options: Options,
        machine: Machine,
        messages: Messages | None,
        optimizer: OptimizerTimes,
        lowering: TimedLowering,
    ):
        self.options, self.lowering = options, lowering
        self.machine = machine_of_rank(machine, layout.ranks) if layout.ranks > 1 else machine
        self.clocks = Clocks(self.machine)
        lanes = {name: SimulatedLane(self.clocks, name) for name in self.clocks.lanes}
        self.device = SimpleNamespace(kept={}, keeps_slabs=machine.overlaps, lanes=lanes, free=lambda tensors: None)
        self.links = links_of(layout, stage, machine, messages, self.clocks)
        self.stashes = StashTimes(self.clocks)
        self.clocks.disks = options.disks
        if rank.disk is not None:
            check_is_timed(rank.disk, options, self.machine)
        if options.goes_by_turns and options.delay:
            self.host: HostTimes = HostTimesWithoutFlush(self.clocks, options, optimizer, self.links)
        else:
            self.host = HostTimes(self.clocks, options, optimizer, self.links, rank.disk)
        kept = rank.levels if rank.levels is not None else [{} for _ in rank.programs]
        self._calls = 0.0, 0.0  # seconds of forward and backward in the last step
        self._programs = [
            ProgramTimer(self, number, program, of_program)
            for number, (program, of_program) in enumerate(zip(rank.programs, kept, strict=True))
        ]

    def time(self) -> StepTime:
        times = [0.0]
        while len(times) <= _MOST_STEPS and (self._pauses or not _is_steady(times)):  # ranks in flight take as many steps
            self._step()
            times.append(self.clocks.caller.now)
        return StepTime(self.clocks.timeline(*times[-2:]), _is_steady(times), *self._calls)

    def _step(self) -> None:
        start = self.clocks.caller.now
        self.host.begin_forward()
        for program in self._programs:
            program.forward()
        between = self.clocks.caller.now
        for program in reversed(self._programs):
            program.backward()
        self._calls = between - start, self.clocks.caller.now - between
        self.host.step()
        if self.links.pipeline is not None and not self._pauses:  # the next step of all ranks begins when the last one is here
            self.links.pipeline.meet(0.0)

    @property
    def _pauses(self) -> bool:
        return any(program.pauses for program in self._programs)

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        """Context manager in which a lane receives work."""
        before, self.clocks.lane = self.clocks.lane, self.device.lanes[lane]._clock
        try:
            yield
        finally:
            self.clocks.lane = before

    def synchronize(self) -> None:
        """The caller waits for all lanes."""
        for lane in self.device.lanes.values():
            lane.synchronize()


def _is_steady(times: Sequence[float]) -> bool:
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return len(seconds) > 1 and math.isclose(seconds[-1], seconds[-2], rel_tol=1e-6)
