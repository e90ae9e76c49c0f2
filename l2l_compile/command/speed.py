"""How long a simulated step takes, which lane bounds it, and how that compares with plain PyTorch on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from l2l_compile.command.models import Workload
from l2l_compile.lanes import AT_WORK, Lane
from l2l_compile.options import Options
from l2l_compile.report.explain import Report
from l2l_compile.report.page.data import lane_texts
from l2l_compile.simulation.result import Simulation
from l2l_compile.units import format_bytes


def speed_of(step: Simulation, workload: Workload) -> str:
    """ "12.4 s a step, 1,321 tokens/s; bound by compute, at work in 82% of the step"."""
    count, unit = (workload.tokens, "tokens") if workload.tokens is not None else (workload.rows, "samples")
    lane = max(AT_WORK, key=step.busy)
    return (
        f"{step.seconds:.3g} s a step, {_rate(count / step.seconds)} {unit}/s; bound by {lane.work}, "
        f"at work in {step.busy(lane):.0%} of the step"
    )


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def lanes_of(step: Simulation, options: Options) -> Iterator[str]:
    """A line for each lane that is at work: seconds, share of the step, and its work."""
    texts = lane_texts(options)
    at_work = [lane for lane in AT_WORK if step.timeline.busy(lane)]
    width = max(8, *map(len, at_work))
    for lane in at_work:
        yield f"  {lane:{width}} {step.timeline.busy(lane):8.4g} s {step.busy(lane):6.1%}  {texts[lane]}"


@dataclass(frozen=True)
class Plain:
    """The same step in plain PyTorch, all on the device: bytes, and seconds if it has the memory.

    Gradients are accumulated over the same micro-batches, and layers are checkpointed: of one micro-batch, the inputs of all
    layers and the activations of the layer at work are there.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    micro_batches: int

    @classmethod
    def of(cls, report: Report, workload: Workload) -> Plain:
        memory, options = report.host_memory, report.options
        inputs = memory.stashes + memory.disk_stashes or report.device_memory.stashes
        return cls(
            sum(p.numel() * p.element_size() for p in workload.model.parameters()),
            sum(p.numel() * p.element_size() for p in workload.trained),
            (memory.optimizer_state or 0) + (memory.disk.states if memory.disk is not None else 0),
            inputs // options.micro_batches + report.device_memory.activations,
            options.micro_batches,
        )

    @property
    def bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.activations

    def seconds(self, step: Simulation) -> float:
        """The compute of the step with l2l, and the optimizer's pass over memory, on the device."""
        moved = 2 * self.parameters + self.gradients + 2 * self.optimizer_state
        return step.timeline.busy(Lane.COMPUTE) + moved / step.machine.kernel_bandwidth

    def told(self, room: int) -> str:
        """Whether it fits, and the parts that are counted."""
        parts = [("parameters", self.parameters), ("gradients", self.gradients), ("optimizer state", self.optimizer_state)]
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        verdict = "fits" if self.bytes <= room else "does not fit"
        return (
            f"without l2l, all on the device: {verdict}, it needs about {format_bytes(self.bytes)} ({shown}, activations "
            f"{format_bytes(self.activations)} of one of {self.micro_batches} micro-batches, checkpointed)"
        )

    def compared(self, step: Simulation) -> str:
        """How long the step would take in plain PyTorch on a device with enough memory, and how much longer with l2l."""
        alone = self.seconds(step)
        return f"plain PyTorch, on such a device with enough memory: about {alone:.3g} s a step; l2l takes {step.seconds / alone:.2f} times as long"
