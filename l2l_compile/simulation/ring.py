"""The cost of collectives in a ring: each rank passes the shards that it receives from the previous rank on to the next rank.

A tensor of B bytes on N ranks is cut into N shards. A shard takes N - 1 hops. All links work at the same time, and each link
carries N - 1 shards (Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4.1):

    (N - 1) / N * B / bandwidth + (N - 1) * latency
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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


def ring_of(machine: Machine, members: int | Sequence[int], world: int | None = None) -> Ring:
    """The ring of some devices, numbered host by host; a number stands for the first ones. Of its hops, one for each host but the
    first is between hosts.

    `world` devices run together, by default those of the ring. Rings that cross hosts share the network.

    Raises `OptionError` for a figure that the machine lacks.
    """
    members = list(range(members)) if isinstance(members, int) else members
    ranks, devices = len(members), int(machine.known("devices"))
    on_host = Counter(member // devices for member in members)
    links, bandwidths, latency = ranks - len(on_host), [math.inf], 0.0
    if links:
        bandwidths.append(machine.known("link"))
        latency += links * machine.known("link_latency")
    if len(on_host) > 1:
        rings = min(world or ranks, devices) / max(on_host.values())
        bandwidths.append(machine.known("network") / max(1.0, rings))
        latency += (len(on_host) - 1) * machine.known("network_latency")
    return Ring(ranks, min(bandwidths), latency)


def host_ring_of(machine: Machine, members: Sequence[int], world: int) -> Ring:
    """The ring of the processes of some devices, for tensors in host memory: within a host they cross its memory twice.

    Raises `OptionError` for a figure that the machine lacks.
    """
    hosts = {member // int(machine.known("devices")) for member in members}
    if len(hosts) > 1:
        return ring_of(machine, members, world)
    return Ring(len(members), machine.host_bandwidth / 2, 0.0)


def machine_of_rank(machine: Machine, ranks: int) -> Machine:
    """The share of a machine that each rank has on a full host. Raises `OptionError` for a figure that the machine lacks."""
    return machine.shared_by(min(ranks, int(machine.known("devices"))))
