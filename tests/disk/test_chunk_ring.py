"""The ring: chunks come read, go written, and no order of them waits for ever."""

from __future__ import annotations

import random

import pytest
import torch

from l2l_compile.disk.chunk_ring import Chunk, ChunkRing
from l2l_compile.disk.disk_store import DiskStore, StoredSpan, await_writes, range_of
from l2l_compile.disk.stored_entries import moved_to_disk
from slow_disk import Faults, slow_disk

SIZE = 64 << 10  # bytes of a chunk
ENTRIES = SIZE // 4


def chunks_of(tensor: torch.Tensor) -> list[Chunk]:
    place = range_of(tensor)
    return [Chunk((StoredSpan(place, start, SIZE, 0),)) for start in range(0, tensor.nbytes, SIZE)]


def add_one(ring: ChunkRing, chunk: Chunk, tensor: torch.Tensor) -> None:
    buffer = ring.take(chunk)
    buffer[:SIZE].view(torch.float32).add_(1)
    ring.give(chunk, buffer, [tensor])


@pytest.mark.parametrize("rate", [None, 20e6])
@pytest.mark.parametrize("count", [1, 2, 8, 20])
def test_every_order_of_chunks_is_read_after_it_was_written(count, rate, tmp_path):
    """The same, another, a part, and more: with one buffer, and with more buffers than chunks."""
    orders = random.Random(0)
    with slow_disk(Faults(rate=rate)):
        store = DiskStore(str(tmp_path))
        tensor = moved_to_disk(store, torch.zeros(8 * ENTRIES))
        ring, chunks, expected = ChunkRing(store, count, SIZE), chunks_of(tensor), torch.zeros(8)
        for _ in range(12):
            chosen = orders.choice([range(8), orders.sample(range(8), 8), orders.sample(range(8), 3), [*range(8), *range(8)]])
            ring.begin()
            for number in chosen:
                add_one(ring, chunks[number], tensor)
                expected[number] += 1
            if orders.random() < 0.3:
                ring.reset()
        await_writes(tensor)
        assert torch.equal(tensor.view(8, -1), expected[:, None].expand(8, ENTRIES))


def test_chunks_are_read_ahead_in_the_order_of_the_step_before(tmp_path):
    """The second step waits for none: all were read while nothing was done."""
    with slow_disk(Faults(rate=4e6)):
        store = DiskStore(str(tmp_path))
        tensor = moved_to_disk(store, torch.zeros(4 * ENTRIES))
        ring = ChunkRing(store, 8, SIZE)
        for _ in range(2):
            ring.begin()
            store._readers.settle()
            before = ring.waited
            for chunk in chunks_of(tensor):
                add_one(ring, chunk, tensor)
            store.settle()
        assert before > 4 * SIZE / 4e6 * 0.9 and ring.waited - before < 0.02


def test_a_tensor_that_is_gone_is_not_read_ahead(tmp_path):
    store = DiskStore(str(tmp_path))
    ring = ChunkRing(store, 4, SIZE)
    gone, kept = (moved_to_disk(store, torch.zeros(ENTRIES)) for _ in range(2))
    ring.begin()
    for tensor in (gone, kept):
        add_one(ring, *chunks_of(tensor), tensor)
    store.settle()
    read = store.read_bytes
    del gone, tensor
    ring.begin()
    assert store.read_bytes == read + SIZE


def test_a_write_keeps_its_tensor_until_it_has_landed(tmp_path):
    """Its place in the file would be given to another tensor, and then overwritten."""
    with slow_disk(Faults(rate=1e6)):
        store = DiskStore(str(tmp_path))
        ring = ChunkRing(store, 4, SIZE)
        tensor = moved_to_disk(store, torch.zeros(ENTRIES))
        (chunk,) = chunks_of(tensor)
        add_one(ring, chunk, tensor)
        del tensor
        place = chunk.spans[0].range
        assert place.is_alive and range_of(moved_to_disk(store, torch.zeros(ENTRIES))).start != place.start
        store.settle()
        assert not place.is_alive
