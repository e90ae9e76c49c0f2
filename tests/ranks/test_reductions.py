"""Gradients are reduced through a buffer of bounded size, with the same bits whatever its size."""

from __future__ import annotations

import pytest
import torch

from l2l_compile.ranks import ranks as module
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.shard_spec import ShardSpec

MIB = 1 << 20


@pytest.mark.parametrize("ranks, size", [(2, 16), (8, 16), (9, 18), (32, 64), (64, 128), (512, 128)])
def test_the_buffer_grows_with_the_ranks_within_bounds(ranks, size):
    entries = module.reduced_entries(ranks, torch.float32)
    assert size * MIB - 4 * ranks < ranks * entries * 4 <= size * MIB


class Alone(Ranks):
    """One rank that sees what it would send."""

    def __init__(self, size: int, rank: int):
        self.shard_mesh_size, self.shard_mesh_rank, self.sent = size, rank, []

    def _sum_to_owners(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent.append(rows.shape)
        return rows[self.shard_mesh_rank] * 3

    def _all_gather_each(self, wholes, shards) -> None:
        self.sent.append([shard.data_ptr() - whole.data_ptr() for whole, shard in zip(wholes, shards, strict=True)])


@pytest.mark.parametrize("entries", [1, 5, 1000])
def test_shards_do_not_depend_on_the_size_of_the_buffer(monkeypatch, entries):
    shapes = [(7, 3), (2,), (1, 4), (12, 2)]  # uneven rows; ranks without any
    gradients = [torch.randn(shape) for shape in shapes]
    monkeypatch.setattr(module, "reduced_entries", lambda ranks, dtype: entries)
    for rank in range(4):
        ranks, shards = Alone(4, rank), [ShardSpec(shape, 4) for shape in shapes]
        found = ranks.reduce_scatter(gradients, shards, mean=False)
        for shard, gradient, shard_spec_of in zip(found, gradients, shards, strict=True):
            span = shard_spec_of.span(rank)
            assert torch.equal(shard, gradient[span.start : span.stop] * 3)
        assert len(ranks.sent) == -(-sum(p.entries for p in shards) // entries)


def test_all_weights_of_a_segment_are_gathered_together():
    ranks = Alone(4, 2)
    ranks.gather([torch.empty(8, 3), torch.empty(0, 3), torch.empty(4)])
    assert ranks.sent == [[2 * 2 * 3 * 4, 2 * 4]]  # each from its own place, in bytes; nothing of a weight without entries


def gathers_each(rank, world):
    from l2l_compile.ranks import collectives

    group = torch.distributed.group.WORLD
    for gather in (collectives.all_gather_in_one, lambda *a: collectives.all_gather_each(*a, lambda work: work.wait())):
        wholes = [torch.zeros(2 * world, 3), torch.zeros(world)]
        for whole in wholes:
            whole.view(world, -1)[rank] = rank + 1
        gather(wholes, [whole.view(world, -1)[rank] for whole in wholes], group)
        for whole in wholes:
            assert whole.view(world, -1).unique(dim=1).flatten().tolist() == list(range(1, world + 1))


def test_places_are_filled_where_they_are(ranks):
    """As on devices, in one call, and as on the host, side by side."""
    ranks.run(gathers_each, world=3)
