"""The time of a training step on a machine, by an interpreter over program nodes, on sizes alone (`program_times.py`).

It gives the work of each node to the clocks of lanes and threads, as the executor does in `simulate`, and computes no tensors. So a
step takes milliseconds to time where `simulate` takes seconds.
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
from l2l_compile.ir.program import Program
from l2l_compile.options import Options
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulated_device import Clocks, SimulatedLane
from l2l_compile.timeline import Timeline

_MOST_STEPS = 6


@dataclass(frozen=True)
class StepTime:
    """A step in virtual time: the work of each lane and thread, and whether the step before took as long."""

    timeline: Timeline
    steady: bool

    @property
    def seconds(self) -> float:
        return self.timeline.seconds


def step_time(
    programs: Sequence[Program],
    options: Options,
    machine: Machine,
    levels: StepLevels | None,
    optimizer: OptimizerTimes,
    lowering: TimedLowering | None = None,
) -> StepTime:
    """Time steps through these programs until two take equally long. Raises `OptionError` for a step that it cannot time.

    levels    what segments keep for backward, of each program; None for nothing
    lowering  has the blocks that were timed before; None for a new one
    """
    return _StepTimer(programs, options, machine, levels, optimizer, lowering).time()


class _StepTimer:
    """Times the steps of programs: forwards in order, and backwards in reverse."""

    def __init__(
        self,
        programs: Sequence[Program],
        options: Options,
        machine: Machine,
        levels: StepLevels | None,
        optimizer: OptimizerTimes,
        lowering: TimedLowering | None,
    ):
        if options.goes_by_turns or any(
            program.captured.mesh is not None or (program.stages is not None and program.stages.ranks > 1) for program in programs
        ):
            raise OptionError("a step of several ranks, or turn by turn, is not timed by its nodes: simulate it")
        if options.pinned_memory is not None:
            raise OptionError("a step with a limit for page-locked memory is not timed by its nodes: simulate it")
        self.options, self.machine, self.clocks = options, machine, Clocks(machine)
        lanes = {name: SimulatedLane(self.clocks, name) for name in self.clocks.lanes}
        self.device = SimpleNamespace(kept={}, keeps_slabs=machine.overlaps, lanes=lanes, free=lambda tensors: None)
        self.lowering = lowering or timed_lowering(options, machine)
        self.host = HostTimes(self.clocks, options, optimizer)
        kept = levels if levels is not None else [{} for _ in programs]
        self._programs = [
            ProgramTimer(self, number, program, of_program)
            for number, (program, of_program) in enumerate(zip(programs, kept, strict=True))
        ]

    def time(self) -> StepTime:
        times = [0.0]
        while len(times) <= _MOST_STEPS and not _is_steady(times):
            self._step()
            times.append(self.clocks.caller.now)
        return StepTime(self.clocks.timeline(*times[-2:]), _is_steady(times))

    def _step(self) -> None:
        self.host.begin_forward()
        for program in self._programs:
            program.forward()
        for program in reversed(self._programs):
            program.backward()
        self.host.step()

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
