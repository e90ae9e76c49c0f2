"""The result of a simulation: seconds, lanes, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from l2l_compile.lanes import AT_WORK, OF_DEVICE, Lane
from l2l_compile.runtime.stats import Stats
from l2l_compile.simulation.machine import Machine
from l2l_compile.timeline import Gap, Timeline, save_together
from l2l_compile.units import format_bytes

_SHOWN = 3  # gaps of each lane


@dataclass(frozen=True)
class Simulation:
    """A training step in virtual time; `print` shows it as a table. A simulated figure is no measurement.

    timeline           the work of each lane, with its times
    stats              bytes moved, and the peak of device memory
    taken_bytes        peak of host memory for wires, stashes, gradients and staging
    pinned_bytes       peak of page-locked host memory
    steady             whether the step took as long as the step before; if not, other steps may take another time
    ranks              the number of ranks that the model is sharded over; bytes, lanes and memory are of one rank
    tokens             tokens in the batch of a rank; None for a model that takes no tokens
    trains             whether it is a training step; else a call without gradients
    stages             for a pipeline, the simulations of all its ranks, this one among them; their steps begin and end together
    """

    machine: Machine
    timeline: Timeline = field(repr=False)
    stats: Stats
    taken_bytes: int
    pinned_bytes: int
    steady: bool = True
    ranks: int = 1
    tokens: int | None = None
    trains: bool = True
    stages: tuple[Simulation, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of the last simulated step."""
        return self.timeline.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks together; None if the model takes no tokens."""
        return None if self.tokens is None else self.ranks * self.tokens / self.seconds

    @property
    def peak_device_bytes(self) -> int:
        return self.stats.peak_device_bytes

    def busy(self, lane: str) -> float:
        """The share of the step in which a lane (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.COMM, "host") is at work."""
        return self.timeline.busy(lane) / self.seconds

    def gaps(self, lane: str) -> list[Gap]:
        """The times in which a lane is idle, the longest first, each with the node that it waits for."""
        return self.timeline.gaps(lane)

    def save(self, path: str | Path) -> None:
        """Write the step as a Chrome trace, which https://ui.perfetto.dev opens."""
        name = f"simulated on {self.machine.name}"
        if self.stages:
            save_together({f"rank {rank}, {name}": stage.timeline for rank, stage in enumerate(self.stages)}, path)
        else:
            self.timeline.save(path, name)

    def __str__(self) -> str:
        where = f"one of {self.ranks} ranks on {self.machine.name}" if self.ranks > 1 else self.machine.name
        if self.stages:
            times = f", {self.ranks} times" if self.ranks > 1 else ""
            where = f"a pipeline of {len(self.stages)} ranks{times} on {self.machine.name}"
        rate = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second is not None else ""
        lines = [f"simulated on {where}: {self.seconds:.4g} s a {'step' if self.trains else 'call'}{rate}"]
        if not self.steady:
            lines.append("  no two steps in a row took as long: this is the last one")
        for rank, stage in enumerate(self.stages):
            shares = ", ".join(f"{lane} {stage.busy(lane):.1%}" for lane in (Lane.COMPUTE, Lane.SEND, Lane.RECV, Lane.H2D))
            here = ", this one" if stage.timeline is self.timeline else ""
            lines.append(f"  rank {rank}: {shares}; device memory {format_bytes(stage.peak_device_bytes)}{here}")
        for lane in AT_WORK:
            lines.append(f"  {lane:8} {self.timeline.busy(lane):8.4g} s at work, {self.busy(lane):6.1%} of the step")
            lines += [f"    {gap}" for gap in self.gaps(lane)[:_SHOWN] if lane in OF_DEVICE]
        lines.append(
            f"device memory at its peak: {format_bytes(self.peak_device_bytes)} of {format_bytes(int(self.machine.device_memory))}"
        )
        lines.append(
            f"host memory besides parameters and optimizer: {format_bytes(self.taken_bytes)}, pinned {format_bytes(self.pinned_bytes)}"
        )
        return "\n".join(lines)
