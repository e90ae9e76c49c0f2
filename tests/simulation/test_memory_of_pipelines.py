"""Device memory of a rank of a pipeline: that of one rank, and three micro-batches of what crosses, whatever the depth."""

from __future__ import annotations

import pytest
import torch
from test_pipeline_in_time import MESSAGE, Equal, stages
from test_schedule import ROWS, WIDTH
from test_sharded import world

import l2l_compile
from l2l_compile.estimate.device_memory import DeviceMemory


def memory(depth: int, turns: int, ranks: int) -> DeviceMemory:
    model, batch = Equal(depth), torch.empty(ROWS * turns, WIDTH)
    with world(ranks) as mesh:
        if ranks > 1:
            l2l_compile.pipeline(model, mesh, stages=stages(depth))
        return l2l_compile.explain(model, {"device": "cpu", "micro_batches": turns})(batch).device_memory


@pytest.mark.parametrize("turns", [2, 4, 8])
def test_a_stage_holds_three_micro_batches_more(turns):
    alone, staged = memory(8, turns, 1), memory(8, turns, 2)
    assert staged.peak <= alone.peak + 3 * MESSAGE
    assert not staged.grows


def test_memory_of_a_stage_is_flat_in_depth():
    assert len({memory(depth, 4, 2).peak for depth in (8, 16, 64)}) == 1
