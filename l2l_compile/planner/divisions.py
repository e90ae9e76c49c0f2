"""The ways in which so many devices can divide a model, and the lines of code that do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from l2l_compile.errors import OptionError
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.simulation.machine import Machine


@dataclass(frozen=True)
class Devices:
    """The devices that a plan is for: how many, and on how many hosts, as many on each."""

    count: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        for name, value in (("devices", self.count), ("hosts", self.hosts)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r}: the number of {name} is an int, 1 at least")
        if self.count % self.hosts:
            raise OptionError(
                f"devices={self.count} cannot be divided evenly among hosts={self.hosts}: devices counts those of all hosts"
            )

    def of(self, machine: Machine) -> Machine:
        """The machine with as many devices on a host."""
        return replace(machine, devices=self.count // self.hosts) if self.count > 1 else machine

    def layouts(self) -> list[Layout]:
        """All divisions of a model among the devices: shards, replicas of them, and stages of a pipeline."""
        found = []
        for depth in divisors(self.count):
            for shards in divisors(self.count // depth):
                layout = Layout(shards, self.count // (depth * shards), depth)
                if depth == 1 and shards == 1 and self.count > 1:
                    continue  # replicas alone repeat the model: shards of the same hosts need less, and no rank more
                found.append(layout)
                if self.hosts > 1 and depth > 1 and layout.batches > 1:
                    found.append(replace(layout, across_hosts=True))
        return found


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def with_loops(layout: Layout, most: int) -> Iterator[Layout]:
    """The layout with each number of stages a rank that is tried: powers of two below the most, and the most."""
    if layout.depth == 1:
        yield layout
        return
    for loops in dict.fromkeys([*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]):
        yield replace(layout, loops=loops)


def lines_of(layout: Layout, batch: str = "batch") -> list[str]:
    """The lines of code that divide `model` in this way, to stand before its optimizer is made."""
    if layout.ranks == 1:
        return []
    sizes = {"replicate": layout.replicas, "shard": layout.shards, "pp": layout.depth}
    order = ("pp", "replicate", "shard") if layout.across_hosts else ("replicate", "shard", "pp")
    dims = [name for name in order if sizes[name] > 1 or (name == "shard" and layout.replicas > 1)]
    names = ", ".join(f'"{name}"' for name in dims)
    mesh = f'mesh = init_device_mesh("cpu", ({", ".join(str(sizes[name]) for name in dims)},), mesh_dim_names=({names},))'
    lines = ["from torch.distributed.device_mesh import init_device_mesh", "import l2l_compile", "", mesh]
    if layout.depth > 1:
        lines.append(f'l2l_compile.pipeline(model, mesh["pp"], {batch}, loops={layout.loops})')
    of_stage = [name for name in dims if name != "pp"]
    if of_stage:
        indexed = f"mesh[{', '.join(repr(name) for name in of_stage)}]".replace("'", '"') if layout.depth > 1 else "mesh"
        lines.append(f"l2l_compile.shard(model, {indexed})")
    return lines


def rows_of(layout: Layout, rows: int) -> int | None:
    """The rows of each rank, or of each pipeline; None if the batch cannot be divided evenly."""
    return rows // layout.batches if rows % layout.batches == 0 else None
