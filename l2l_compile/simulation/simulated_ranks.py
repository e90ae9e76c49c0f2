"""The other ranks in virtual time: those of a stage do the same at the same time, so a collective begins when this rank begins it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError
from l2l_compile.lowering.costs import nbytes
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.placement import pipeline_of
from l2l_compile.ranks.ranks import Ranks, ranks_of, replicates
from l2l_compile.ranks.sharded import is_of_a_parallel_layer, is_sharded
from l2l_compile.simulation.alone_in_time import AloneInTime
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.ring import Ring, host_ring_of, ring_of
from l2l_compile.simulation.simulated_device import Clocks
from l2l_compile.simulation.simulated_pipeline import SimulatedPipeline


class SimulatedRanks(AloneInTime, Ranks):
    """Collectives take the time of a ring, on the lane or the thread that runs them, and exchange nothing.

    The code around the collectives is the real code: it fills buffers and divides sums.
    """

    def __init__(self, division: Division, clocks: Clocks, pipeline: SimulatedPipeline | None = None):
        real = division.ranks
        self.shard_mesh_size, self.shard_mesh_rank = real.shard_mesh_size, real.shard_mesh_rank
        self.replicate_mesh_size, self.replicate_mesh_rank = real.replicate_mesh_size, real.replicate_mesh_rank
        self.world_size, self.world_rank = real.world_size, real.world_rank
        self.forwards = self.steps = 0
        if pipeline is not None:
            self.pipeline, self.shares, self.compares_settings = pipeline, pipeline.shares, False
            assert real.pipeline is not None, "the stages of a pipeline are sharded"
            self.world_rank += pipeline.world_rank - real.pipeline.world_rank
        self._division, self._clocks = division, clocks

    def meet(self) -> None:
        if isinstance(self.pipeline, SimulatedPipeline):
            self.pipeline.meet(self._division.ring.latency)
        else:
            self._clocks.spend(self._division.ring.latency)

    def sum_on_host(self, values: Sequence[float]) -> list[float]:
        self.meet()
        return [self.shard_mesh_size * value for value in values]

    def average_replicas(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the time of the exchange on the host."""
        size = sum(g.numel() * torch.promote_types(g.dtype, torch.float32).itemsize for g in gradients if g is not None)
        ring, count = self._division.of_replicas, self.replicate_mesh_size
        assert ring is not None, "there are replicas"
        self._clocks.spend(ring.seconds(count * size) + count * size / self._clocks.machine.host_bandwidth)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self._clocks.queue(self._division.ring.seconds(nbytes([whole])))

    def _all_gather_each(self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        if wholes:
            self._clocks.queue(self._division.ring.seconds(nbytes(wholes)))

    def _sum_to_owners(self, rows: torch.Tensor) -> torch.Tensor:
        self._clocks.queue(self._division.ring.seconds(nbytes([rows])))
        return rows.new_empty(rows.shape[1:])


@dataclass(frozen=True)
class Division:
    """Several ranks among which a model is sharded, and the rings that they are in.

    ring         of the ranks that have a shard each, for weights and gradients
    of_replicas  of the ranks that have the same shard, for means of gradients on the host; None without replicas
    """

    mesh: DeviceMesh
    ranks: Ranks
    ring: Ring
    of_replicas: Ring | None

    @property
    def copies(self) -> int:
        """How many ranks have rows of their own."""
        return self.ranks.shard_mesh_size * self.ranks.replicate_mesh_size


def modules_of(model: Callable) -> list[nn.Module]:
    """The module that a model is, or whose method it is."""
    return [m for m in (model, getattr(model, "__self__", None)) if isinstance(m, nn.Module)]


def pipeline_behind(model: Callable) -> PipelineRanks | None:
    """The ranks among which `pipeline` has divided a model."""
    return next((ranks for module in modules_of(model) if (ranks := pipeline_of(module)) is not None), None)


def division_of(model: Callable, machine: Machine) -> Division | None:
    """How `shard` has sharded a model; None for one rank.

    Raises `L2LError` for parallel layers, `OptionError` for a figure that the machine lacks.
    """
    mesh = None
    for name, parameter in (named for module in modules_of(model) for named in module.named_parameters()):
        if not is_sharded(parameter):
            continue
        if is_of_a_parallel_layer(parameter) or parameter.device_mesh.ndim > 1 and not replicates(parameter.device_mesh):
            raise L2LError(
                f"parameter '{name}' is sharded over {parameter.device_mesh}: simulate does not know the sums of parallel layers; simulate a "
                "model that l2l_compile.shard has sharded, without parallelize_module"
            )
        mesh = parameter.device_mesh
    if mesh is None or mesh.size() == 1:
        return None
    ranks = ranks_of(mesh)
    return Division(
        mesh,
        ranks,
        ring_of(machine, _members(mesh, -1), ranks.world_size),
        host_ring_of(machine, _members(mesh, 0), ranks.world_size) if mesh.ndim > 1 else None,
    )


def _members(mesh: DeviceMesh, dim: int) -> list[int]:
    """The ranks of the process that differ from this one along a dimension of a mesh alone."""
    place = list(mesh.get_coordinate() or ())
    along = mesh.mesh.movedim(dim, -1)
    place.pop(dim)
    return along[tuple(place)].tolist()
