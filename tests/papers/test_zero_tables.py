"""Tables 1 and 2 of ZeRO (arXiv 1910.02054), from programs of sharded models with plain Adam.

A program has bytes for weights in 16 bits (the wire), for gradients in 16 bits, for parameters in 32 bits and for Adam's state. One rank
has all of them, and one of N ranks has its shards. P_os shards parameters and state, P_os+g gradients as well, and P_os+g+p all: that
is what `shard` does. The first two are put together from the programs of one rank and of N.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import l2l_compile
from l2l_compile.estimate.host_memory import HostMemory

SIZES = {"7.5 B": (28, 16384), "128 B": (119, 32768), "1 T": (233, 65536)}  # layers and width: parameters within 0.25 %
RANKS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {  # GB a device: P_os, P_os+g, P_os+g+p
    "7.5 B": ((120, 120, 120), (52.5, 41.3, 30), (35.6, 21.6, 7.5), (31.4, 16.6, 1.88), (30.4, 15.4, 0.47), (30.1, 15.1, 0.12)),
    "128 B": ((2048, 2048, 2048), (896, 704, 512), (608, 368, 128), (536, 284, 32), (518, 263, 8), (513, 257, 2)),
    "1 T": ((16000,) * 3, (7000, 5500, 4000), (4750, 2875, 1000), (4187, 2218, 250), (4046, 2054, 62.5), (4011, 2013, 15.6)),
}
TABLE_2 = {  # billions of parameters on devices of 32 GB, 64 in a data parallel group; model parallel over 1, 2, 4, 8, 16
    "baseline": (2, 4, 8, 16, 32),
    "P_os": (7.6, 15.2, 30.4, 60.8, 121.6),
    "P_os+g": (14.4, 28.8, 57.6, 115.2, 230.4),
    "P_os+g+p": (128, 256, 512, 1024, 2048),
}


@functools.cache
def held(size: str, ranks: int) -> HostMemory:
    """What a program of one of `ranks` ranks holds; the other ranks do not exist."""
    layers, width = SIZES[size]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        if ranks > 1:
            model = l2l_compile.shard(model, init_device_mesh("cpu", (ranks,)))
        options = {
            "precision": "bf16",
            "update": "in_forward",
            "optimizer": torch.optim.Adam(model.parameters()),
            "device": "cpu",
        }
        return l2l_compile.explain(model, options)(torch.zeros(2, width)).host_memory
    finally:
        if ranks > 1:
            dist.destroy_process_group()
        torch._dynamo.reset()


def stages(size: str, ranks: int) -> tuple[float, float, float]:
    """GB of a device with P_os, P_os+g and P_os+g+p."""
    whole, shard = held(size, 1), held(size, ranks)
    state = shard.master + shard.optimizer_state
    found = whole.wire + whole.gradients + state, whole.wire + shard.gradients + state, shard.wire + shard.gradients + state
    return tuple(each / 1e9 for each in found)


def decimals(value: float) -> int:
    """How many decimals the paper prints."""
    return len(str(value).partition(".")[2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.slow(but="7.5 B")
def test_table_1_of_zero_is_that_of_programs(size):
    for ranks, expected in zip(RANKS, TABLE_1[size], strict=True):
        found = [round(value, decimals(printed)) for value, printed in zip(stages(size, ranks), expected, strict=True)]
        assert found == [pytest.approx(printed, rel=0.01) for printed in expected], ranks


def test_table_2_of_zero_is_that_of_programs():
    """Model parallelism over N_m devices divides all bytes by N_m (section 7)."""
    layers, width = SIZES["7.5 B"]
    of_a_parameter = [1e9 * held_gb / (layers * width**2) for held_gb in (stages("7.5 B", 1)[0], *stages("7.5 B", 64))]
    for name, bytes_ in zip(TABLE_2, of_a_parameter, strict=True):
        for parallel, printed in zip((1, 2, 4, 8, 16), TABLE_2[name], strict=True):
            assert parallel * 32 / bytes_ == pytest.approx(printed, rel=0.01), (name, parallel)
