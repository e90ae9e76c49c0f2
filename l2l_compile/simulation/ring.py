"""The cost of collectives in a ring: each rank passes the shards that it receives from the previous rank on to the next rank.

A tensor of B bytes on N ranks is cut into N shards. A shard takes N - 1 hops. All links work at the same time, and each link
carries N - 1 shards (Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4.1):

    (N - 1) / N * B / bandwidth + (N - 1) * latency
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from l2l_compile.simulation.machine import Machine


@dataclass(frozen=True)
class Ring:
    """Ranks in a ring.

    bandwidth  bytes a second of the slowest link
    latency    seconds of all hops together
    """

    ranks: int
    bandwidth: float
    latency: float

    def seconds(self, size: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor that has `size` bytes on all ranks together."""
        return (self.ranks - 1) / self.ranks * size / self.bandwidth + self.latency


def ring_of(machine: Machine, ranks: int) -> Ring:
    """The ring of `ranks` devices, host by host. Of its `ranks` - 1 hops, one for each host but the first is between hosts.

    Raises `OptionError` for a figure that the machine lacks.
    """
    hosts = math.ceil(ranks / machine.known("devices"))
    links, bandwidths, latency = ranks - hosts, [], 0.0
    if links:
        bandwidths.append(machine.known("link"))
        latency += links * machine.known("link_latency")
    if hosts > 1:
        bandwidths.append(machine.known("network"))
        latency += (hosts - 1) * machine.known("network_latency")
    return Ring(ranks, min(bandwidths), latency)


def machine_of_rank(machine: Machine, ranks: int) -> Machine:
    """The share of a machine that each rank has on a full host. Raises `OptionError` for a figure that the machine lacks."""
    return machine.shared_by(min(ranks, int(machine.known("devices"))))
