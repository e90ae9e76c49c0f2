"""The ranks that share the parallel layers of a model that `shard` has not divided: they run the same rows, and step by themselves."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .collectives import group_named
from .ranks import Ranks, own_group


class Sharing(Ranks):
    """The ranks of the mesh of `parallelize_module`. They compare what they begin; their parameters are divided by that mesh alone."""

    divides = False

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup):
        self._made_for, self.part_group = weakref.ref(group), group
        self.size, self.rank = 1, 0
        self.parts = self.count = mesh.size()
        self.part = self.number = dist.get_rank(group)
        self._met = False

    def announce(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """As that of `Ranks`. The first one makes the group in which ranks tell: a program is made without the other ranks."""
        if not self._met:
            self.control_group, self.sums_group = own_group(self.part_group), own_group(self.part_group)
            self._met = True
        return super().announce(*args, **kwargs)


_known: dict[DeviceMesh, Sharing] = {}


def ranks_sharing(mesh: DeviceMesh) -> Ranks:
    """The ranks of the mesh of a parallel layer."""
    # The group of the mesh itself may be from before torch.distributed has begun anew.
    group = group_named(mesh.get_group().group_name)
    known = _known.get(mesh)
    if known is None or not known.made_for(group):
        if known is not None:
            del _known[mesh]  # with the mesh of before, which is equal, and keeps its process groups
            known.close()
        known = _known[mesh] = Sharing(mesh, group)
    return known
