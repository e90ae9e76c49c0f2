"""Whether a step fits on a machine, and by how many bytes it does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from l2l_compile.ir.rank_layout import Layout
from l2l_compile.report.explain import Report
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import machine_of_rank
from l2l_compile.units import format_bytes


@dataclass(frozen=True)
class Need:
    """Bytes that a step needs of a memory, the bytes that tensors may have there, and the reserve that they may not have.

    reserve  bytes, and whose they are
    """

    memory: str
    bytes: int
    room: int
    reserve: tuple[int, str]

    @property
    def excess(self) -> int:
        return max(0, self.bytes - self.room)

    @property
    def short(self) -> str:
        """ "device 8.4 GiB of 23.0 GiB"."""
        return f"{self.memory.removesuffix(' memory')} {format_bytes(self.bytes)} of {format_bytes(self.room)}"

    def __str__(self) -> str:
        size, whose = self.reserve
        less = f" ({format_bytes(self.room + size)} less {format_bytes(size)} for {whose})" if size else ""
        line = f"{self.memory}: {format_bytes(self.bytes)} of {format_bytes(self.room)}{less}"
        return f"too large {line}, {format_bytes(self.excess)} too much" if self.excess else f"fits      {line}"


@dataclass(frozen=True)
class Fit:
    """The needs of a step on a machine."""

    needs: tuple[Need, ...]

    @classmethod
    def of(cls, report: Report, machine: Machine) -> Fit:
        """The needs of a report on a machine. A host that is the device holds values of layers at work as well."""
        host, at_work = report.host_memory.total, report.device_memory
        for_system = (int(machine.host_reserve), "the operating system, Python and PyTorch")
        if not machine.overlaps:
            host += at_work.peak - at_work.weights
            return cls((Need("host memory with layers at work", host, machine.host_room, for_system),))
        for_driver = (int(machine.device_reserve), "driver, context and libraries")
        return cls(
            (
                Need("device memory", at_work.peak, machine.device_room, for_driver),
                Need("host memory", host, machine.host_room, for_system),
            )
        )

    @classmethod
    def of_stages(cls, reports: Sequence[Report], layout: Layout, machine: Machine) -> Fit:
        """The needs of ranks on a machine: of the device that needs most, and of the host that does. `reports` has one for each stage."""
        if layout.ranks == 1:
            return cls.of(reports[0], machine)
        each = [cls.of(report, machine_of_rank(machine, layout.ranks)).needs for report in reports]
        *devices, _ = (max(found, key=lambda need: need.bytes) for found in zip(*each, strict=True))
        of_stage = [needs[-1].bytes for needs in each]
        most = max(_of_hosts(layout, of_stage, int(machine.known("devices"))))
        host = replace(
            each[0][-1], bytes=most, room=machine.host_room, reserve=(int(machine.host_reserve), each[0][-1].reserve[1])
        )
        return cls((*devices, host))

    @property
    def fits(self) -> bool:
        return not self.excess

    @property
    def excess(self) -> int:
        """Bytes too much, of all memories."""
        return sum(need.excess for need in self.needs)

    @property
    def short(self) -> str:
        """ "device 8.4 GiB, host 125.7 GiB"."""
        return ", ".join(f"{need.memory.removesuffix(' memory')} {format_bytes(need.bytes)}" for need in self.needs)

    def too_large(self, memory: str) -> bool:
        return any(need.excess for need in self.needs if need.memory.startswith(memory))


def _of_hosts(layout: Layout, of_stage: Sequence[int], devices: int) -> list[int]:
    """The bytes of the ranks of each host together, given those of a rank of each stage."""
    found: dict[int, int] = {}
    for replica, shard, stage in itertools.product(range(layout.replicas), range(layout.shards), range(layout.depth)):
        host = layout.member(replica, shard, stage) // devices
        found[host] = found.get(host, 0) + of_stage[stage]
    return list(found.values())
