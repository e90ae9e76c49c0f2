"""Device memory of a rank of a pipeline does not grow with the depth of the model, where stashes are on the host."""

from __future__ import annotations

import pytest
import torch
from pipelines import Case, llama
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile

SHALLOW, REAL = 8, 16  # layers: of the model that others are compared with, and of the deepest one that runs
BATCH = Case("llama").batch(0)
OPTIONS = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", "stash": "host"}
TURNS = {"in turn": 0, "in a row": 1}


def stages(depth: int, loops: int) -> list[list[str]]:
    """Layers go to two ranks in turn or, with one loop, in two rows."""
    layers = [f"model.layers.{number}" for number in range(depth)]
    cut = [layers[: depth // 2], layers[depth // 2 :]] if loops else [[layer] for layer in layers]
    return [["model.embed_tokens", *cut[0]], *cut[1:-1], [*cut[-1], "model.norm", "lm_head"]]


def peak(rank, world, depth, loops):
    """The peak that `explain` expects. Runs two steps of a model that is not too deep, which have to agree."""
    torch._dynamo.reset()
    model = llama(depth)
    if world > 1:
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), stages=stages(depth, loops))
    expected = l2l_compile.explain(model, OPTIONS)(**BATCH).device_memory
    assert not expected.grows
    if depth <= REAL:
        step = torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)
        for _ in range(2):
            step(**BATCH).loss.backward()
            assert l2l_compile.stats(step).peak_device_bytes == expected.peak
    return expected.peak


@pytest.mark.parametrize("loops", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("depth", [REAL, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)])
def test_device_memory_of_a_rank_is_flat_in_depth(ranks, depth, loops):
    shallow, deep = (ranks.run(peak, each, loops, world=2, seconds=240) for each in (SHALLOW, depth))
    assert deep == shallow
