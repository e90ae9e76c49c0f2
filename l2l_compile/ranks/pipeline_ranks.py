"""The ranks of a pipeline: each runs some segments of the same rows, and sends what they make to the others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError
from l2l_compile.ranks import collectives as exchange
from l2l_compile.ranks.collectives import finish
from l2l_compile.ranks.ranks import Ranks, own_group
from l2l_compile.ranks.watch import Watch


class PipelineRanks(Ranks):
    """The ranks of a mesh of one dimension. Their parameters are their own, and they announce their actions.

    A message is a broadcast within a process group of two ranks, one for each direction: unlike `isend` of gloo, it can be polled,
    so that a rank that waits for one that has failed stops waiting.
    """

    shards = compares_settings = False
    parameters = 0  # how many the models of the pipeline have, on all ranks
    shares = "are stages of a pipeline"

    def __init__(self, mesh: DeviceMesh):
        group = mesh.get_group()
        self._made_for = weakref.ref(group)
        self.shard_mesh_size, self.shard_mesh_rank = 1, 0
        self.members = dist.get_process_group_ranks(group)
        self.world_size, self.world_rank = len(self.members), self.members.index(dist.get_rank())
        self.described, self.pipeline = str(mesh), self
        self.control_group, self.host_group = own_group(group), own_group(group)
        self._pairs = dict(self._make_pairs())

    @property
    def watch(self) -> Watch:
        return self.within.watch if self.within is not None else super().watch

    def _make_pairs(self) -> Iterator[tuple[tuple[int, int], weakref.ref[dist.ProcessGroup]]]:
        """A process group for each direction between this rank and another.

        PyTorch names a group by the number of groups that a process has so far, so each rank makes one in each round: with another rank
        or, if their number is odd, for itself.
        """
        for partner in partners(self.world_rank, self.world_size):
            ranks = sorted({self.members[self.world_rank], self.members[partner]})
            for source, target in sorted(((self.world_rank, partner), (partner, self.world_rank))):
                yield (source, target), weakref.ref(dist.new_group(ranks, use_local_synchronization=True))

    def _pair(self, source: int, target: int) -> dist.ProcessGroup:
        group = self._pairs[source, target]()
        if group is None:
            raise L2LError(
                "torch.distributed has ended (destroy_process_group) since l2l_compile.pipeline was called: call it again"
            )
        return group

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        """Send a tensor to a rank of the pipeline; asynchronous (lane `send`)."""
        return exchange.message(tensor.contiguous(), self.members[self.world_rank], self._pair(self.world_rank, to))

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        """Fill a contiguous tensor with the next one that a rank of the pipeline sends here; asynchronous (lane `recv`)."""
        return exchange.message(tensor, self.members[source], self._pair(source, self.world_rank))

    def finish_message(self, message: dist.Work | None) -> None:
        """Wait for a message on the host; on devices, the lane is behind it already. Raises `RankError` if a rank has failed."""
        if message is not None:
            finish(message, self.check, self.watch.explain)

    def sum_of_callers(self, values: Sequence[float]) -> list[float]:
        """As `sum_on_host`, for the thread of the training loop."""
        return self._summed(values, self.control_group)

    def abort(self) -> None:
        for pair in self._pairs.values():
            if (group := pair()) is not None:
                exchange.leave(group)
        self.watch.abandoned = True  # the process ends without waiting either


_known: dict[DeviceMesh, PipelineRanks] = {}


def pipeline_ranks_of(mesh: DeviceMesh) -> PipelineRanks:
    """The ranks of a mesh of one dimension, made if needed: all of them must call this. Models over the same mesh share them."""
    known = _known.get(mesh)
    if known is None or not known.made_for(mesh.get_group()):
        if known is not None:
            del _known[mesh]  # also drops the key, an earlier mesh that compares equal and keeps its process groups alive
            known.close()
        known = _known[mesh] = PipelineRanks(mesh)
    return known


def partners(rank: int, size: int) -> list[int]:
    """The partner of a rank in each round of a tournament, in which each two ranks meet once; itself in a round that it sits out."""
    rounds = size - 1 + size % 2
    found = []
    for number in range(rounds):
        partner = (number - rank) % rounds
        if size % 2 == 0 and rank == size - 1:  # the last one meets the rank that would meet itself
            partner = number * (rounds + 1) // 2 % rounds
        elif size % 2 == 0 and partner == rank:
            partner = size - 1
        found.append(partner)
    return found
