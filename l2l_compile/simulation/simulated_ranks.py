"""The other ranks in virtual time: all do the same at the same time, so a collective begins when this rank begins it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError
from l2l_compile.lowering.costs import nbytes
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.placement import placed
from l2l_compile.ranks.ranks import Ranks, standing_in
from l2l_compile.ranks.sharded import is_of_a_parallel_layer, is_sharded
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import Ring, ring_of
from l2l_compile.simulation.simulated_device import Clocks


class SimulatedRanks(Ranks):
    """Collectives take the time of a ring, on the lane or the thread that runs them, and exchange nothing.

    The code around the collectives is the real code: it fills buffers and divides sums.
    """

    def __init__(self, size: int, rank: int, ring: Ring, clocks: Clocks):
        self.shard_mesh_size = self.world_size = size
        self.shard_mesh_rank = self.world_rank = rank
        self.forwards = self.steps = 0
        self._ring, self._clocks = ring, clocks

    def check(self) -> None:
        """Does nothing: no simulated rank fails."""

    def failed(self, error: BaseException) -> None:
        """Does nothing: there is no other rank to tell."""

    def announce(
        self,
        kind: ActionKind,
        collectives: tuple[str, ...] = (),
        train: bool = False,
        told: Sequence[int] = (),
        refuse: Callable[[list[list[int]]], None] | None = None,
    ) -> list[list[int]]:
        """All ranks announce the same numbers as this one."""
        self._clocks.spend(self._ring.latency)
        rows = [list(told) for _ in range(self.shard_mesh_size)]
        if refuse is not None:
            refuse(rows)
        return rows

    def sum_on_host(self, values: Sequence[float]) -> list[float]:
        self._clocks.spend(self._ring.latency)
        return [self.shard_mesh_size * value for value in values]

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self._clocks.queue(self._ring.seconds(nbytes([whole])))

    def _all_gather_each(self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        if wholes:
            self._clocks.queue(self._ring.seconds(nbytes(wholes)))

    def _sum_to_owners(self, rows: torch.Tensor) -> torch.Tensor:
        self._clocks.queue(self._ring.seconds(nbytes([rows])))
        return rows.new_empty(rows.shape[1:])


@dataclass(frozen=True)
class Division:
    """Several ranks among which a model is sharded, and the ring that they are in."""

    mesh: DeviceMesh
    ring: Ring

    @contextmanager
    def in_virtual_time(self, clocks: Clocks) -> Iterator[None]:
        """A context in which the ranks of the mesh are simulated."""
        mesh = self.mesh
        with standing_in({mesh: SimulatedRanks(mesh.size(), mesh.get_local_rank(), self.ring, clocks)}):
            yield


def division_of(model: Callable, machine: Machine) -> Division | None:
    """How `shard` has sharded a model; None for one rank.

    Raises `L2LError` for parallel layers and for a pipeline, `OptionError` for a figure that the machine lacks.
    """
    modules = [m for m in (model, getattr(model, "__self__", None)) if isinstance(m, nn.Module)]
    found = None
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        if is_of_a_parallel_layer(parameter) or is_sharded(parameter) and parameter.device_mesh.ndim > 1:
            raise L2LError(
                f"parameter '{name}' is sharded over {parameter.device_mesh}: simulate knows neither the sums of parallel layers "
                "nor replicas; simulate a model that l2l_compile.shard alone has sharded, over a mesh of one dimension"
            )
        if placed(parameter) is not None:
            raise L2LError(
                f"parameter '{name}' is on one rank of a pipeline: simulate does not know messages between stages yet; simulate the plain "
                "model, or see l2l_compile.explain for the share of a step in which stages are idle"
            )
        if is_sharded(parameter):
            found = parameter.device_mesh
    return Division(found, ring_of(machine, found.size())) if found is not None and found.size() > 1 else None
