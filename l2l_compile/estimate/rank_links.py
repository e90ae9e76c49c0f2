"""How a rank is joined to others in virtual time: the rings that it is in, and the stages of its pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from l2l_compile.ir.rank_layout import Layout
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import Ring, host_ring_of, ring_of
from l2l_compile.simulation.simulated_device import Clocks
from l2l_compile.simulation.simulated_pipeline import Messages, SimulatedPipeline


@dataclass(frozen=True)
class RankLinks:
    """A rank among others; one alone has none of them.

    ring         of the ranks over which its stage is sharded
    of_replicas  of the ranks that have the same shard, for means of gradients on the host
    pipeline     the ranks that run the other stages for the same rows
    """

    ring: Ring | None = None
    of_replicas: Ring | None = None
    pipeline: SimulatedPipeline | None = None

    def meet(self, clocks: Clocks) -> None:
        """The running thread announces something, and waits for the other ranks."""
        if self.pipeline is not None:
            self.pipeline.meet(self.ring.latency if self.ring is not None else None)
        elif self.ring is not None:
            clocks.spend(self.ring.latency)


def links_of(layout: Layout, stage: int, machine: Machine, messages: Messages | None, clocks: Clocks) -> RankLinks:
    """The links of a rank of a stage, in the first replica, on a machine. `messages` are those of the pipeline.

    Raises `OptionError` for a figure that the machine lacks.
    """
    pipeline = SimulatedPipeline(messages, stage, clocks) if messages is not None else None
    if layout.batches == 1:
        return RankLinks(pipeline=pipeline)
    ring = ring_of(machine, layout.shards_of(stage), layout.ranks)
    replicas = host_ring_of(machine, layout.replicas_of(stage), layout.ranks) if layout.replicas > 1 else None
    return RankLinks(ring, replicas, pipeline)
