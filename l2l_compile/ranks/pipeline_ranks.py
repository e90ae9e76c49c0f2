"""The ranks of a pipeline: each runs some segments of the same rows, and sends what they make to the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError
from l2l_compile.ranks import collectives as exchange
from l2l_compile.ranks.announced import Announced
from l2l_compile.ranks.collectives import finish
from l2l_compile.ranks.ranks import Ranks, own_group
from l2l_compile.ranks.watch import Watch


class PipelineRanks(Ranks):
    """The ranks of a mesh of one dimension. Their parameters are their own, and they announce their actions.

    A message is a broadcast within a process group of two ranks, one for each direction: unlike `isend` of gloo, it can be polled,
    so that a rank that waits for one that has failed stops waiting. Two steps that run at the same time, as those of a schedule without
    a flush do, have a channel each: groups of their own, since their messages come in another order on each rank.
    """

    shards = compares_settings = False
    parameters = 0  # how many the models of the pipeline have, on all ranks
    in_flight: weakref.ref[Any] | None = None  # of the model that had turns in flight last (`runtime/in_flight.py`)
    shares = "are stages of a pipeline"

    def __init__(self, mesh: DeviceMesh):
        group = mesh.get_group()
        self._made_for = weakref.ref(group)
        self.shard_mesh_size, self.shard_mesh_rank = 1, 0
        self.members = dist.get_process_group_ranks(group)
        self.world_size, self.world_rank = len(self.members), self.members.index(dist.get_rank())
        self.described, self.pipeline = str(mesh), self
        self.control_group, self.host_group = own_group(group), own_group(group)
        self._channels = [dict(self._make_pairs())]
        self._announced: Announced | None = None

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

    def open_channels(self, count: int) -> None:
        """Have this many channels. All ranks must call this at the same place."""
        while len(self._channels) < count:
            self._channels.append(dict(self._make_pairs()))

    def _device_groups(self) -> list[dist.ProcessGroup]:
        return [self._pair(source, target, channel) for channel, pairs in enumerate(self._channels) for source, target in pairs]

    def _pair(self, source: int, target: int, channel: int) -> dist.ProcessGroup:
        group = self._channels[channel][source, target]()
        if group is None:
            raise L2LError(
                "torch.distributed has ended (destroy_process_group) since l2l_compile.pipeline was called: call it again"
            )
        return group

    def send(self, tensor: torch.Tensor, to: int, channel: int = 0) -> dist.Work | None:
        """Send a tensor to a rank of the pipeline; asynchronous (lane `send`)."""
        return exchange.message(tensor.contiguous(), self.members[self.world_rank], self._pair(self.world_rank, to, channel))

    def receive(self, tensor: torch.Tensor, source: int, channel: int = 0) -> dist.Work | None:
        """Fill a contiguous tensor with the next one that a rank of the pipeline sends here; asynchronous (lane `recv`)."""
        return exchange.message(tensor, self.members[source], self._pair(source, self.world_rank, channel))

    def finish_message(self, message: dist.Work | None) -> None:
        """Wait for a message on the host; on devices, the lane is behind it already. Raises `RankError` if a rank has failed."""
        if message is not None:
            finish(message, self.check, self.watch.explain)

    def follow(self, announced: Announced) -> None:
        """From now on, whoever waits for a message of another rank also looks whether all ranks have announced the same."""
        self._announced = announced

    def heard(self) -> None:
        """Wait until all ranks have announced what this one `follow`s. Raises as `announce`."""
        announced, self._announced = self._announced, None
        if announced is not None:
            announced.told()

    def check(self) -> None:
        super().check()
        if (announced := self._announced) is not None:
            announced.look()

    def number_of_first(self, mine: int, channel: int) -> Callable[[], int]:
        """A number of the first rank, which has `mine` (lanes are idle): a function that waits until it is here."""
        number = torch.tensor([mine])
        if self.world_rank == 0:
            for other in range(1, self.world_size):
                self.send(number, other, channel)
            return lambda: mine
        message = self.receive(number, 0, channel)

        def found() -> int:
            self.finish_message(message)
            return int(number)

        return found

    def sum_of_callers(self, values: Sequence[float]) -> list[float]:
        """As `sum_on_host`, for the thread of the training loop."""
        return self._summed(values, self.control_group)

    def abort(self) -> None:
        for pair in (pair for channel in self._channels for pair in channel.values()):
            if (group := pair()) is not None:
                exchange.leave(group)
        self._announced = None
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
