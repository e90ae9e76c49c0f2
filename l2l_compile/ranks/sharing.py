"""The ranks that share parallel layers of a model that `shard` has not sharded: all run the same rows, and each steps alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.ranks.collectives import group_named
from l2l_compile.ranks.ranks import Ranks, own_group


class Sharing(Ranks):
    """The ranks of the mesh of `parallelize_module`. They announce their actions; their parameters are sharded over that mesh alone."""

    shards = False

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup):
        self._made_for, self.tp_group = weakref.ref(group), group
        self.shard_mesh_size, self.shard_mesh_rank = 1, 0
        self.tp_size = self.world_size = mesh.size()
        self.tp_rank = self.world_rank = dist.get_rank(group)
        self._met = False

    def announce(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """As `Ranks.announce`. The first call makes the process groups, since compilation may not wait for other ranks."""
        if not self._met:
            self.control_group, self.sums_group = own_group(self.tp_group), own_group(self.tp_group)
            self._met = True
        return super().announce(*args, **kwargs)


_known: dict[DeviceMesh, Sharing] = {}


def ranks_sharing(mesh: DeviceMesh) -> Ranks:
    """The ranks of the mesh of a parallel layer."""
    # The mesh may hold a group of an earlier initialization of torch.distributed, so the group is found by its name.
    group = group_named(mesh.get_group().group_name)
    known = _known.get(mesh)
    if known is None or not known.made_for(group):
        if known is not None:
            del _known[mesh]  # also drops the key, an earlier mesh that compares equal and keeps its process groups alive
            known.close()
        known = _known[mesh] = Sharing(mesh, group)
    return known
