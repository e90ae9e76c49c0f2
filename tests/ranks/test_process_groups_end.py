"""Process groups end with `destroy_process_group`: neither their threads nor what was compiled with them stays."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.errors import L2LError
from l2l_compile.session import Session


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 1))


def _train(world: int) -> None:
    torch.manual_seed(0)
    model = _model()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"micro_batches": 2, "optimizer": optimizer, "update": "in_backward", "compile_update": False}
    compiled = torch.compile(model, backend="l2l", options=options, fullgraph=True)
    for _ in range(2):
        compiled(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _threads() -> Counter[str]:
    return Counter(name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm") if name.exists())


def _begin(rank: int, world: int, folder: str, number: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{number}", world), rank=rank, world_size=world)
    pool.meet()


def _one_after_another(rank: int, world: int, folder: str) -> list[tuple[Counter[str], int]]:
    """Threads, and sessions that are still there, behind each of four process groups."""
    found = []
    for number in range(4):
        dist.destroy_process_group()
        gc.collect()
        found.append((_threads(), sum(isinstance(thing, Session) for thing in gc.get_objects())))
        _begin(rank, world, folder, number)
        _train(world)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.slow
def test_no_thread_and_no_session_outlives_its_process_group(ranks, tmp_path):
    for found in ranks.run(_one_after_another, str(tmp_path)):
        threads, sessions = zip(*found, strict=True)
        assert sessions[-1] <= sessions[0], found
        for name in ("gloo_tcp_loop", "pt_gloo_runloop", "l2l-host", "l2l-watch"):
            assert threads[3][name] <= threads[2][name], (name, found)
        assert threads[3].total() <= threads[2].total(), found


def _used_after_the_end(rank: int, world: int, folder: str) -> str:
    model = _model()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    compiled = torch.compile(model, backend="l2l", options={"micro_batches": 2}, fullgraph=True)
    compiled(torch.randn(4, 8)).sum().backward()
    dist.destroy_process_group()
    try:
        compiled(torch.randn(4, 8))
    except L2LError as error:
        return str(error)
    finally:
        _begin(rank, world, folder, 0)
    return "no error"


def test_a_model_of_an_ended_process_group_says_so(ranks, tmp_path):
    for said in ranks.run(_used_after_the_end, str(tmp_path)):
        assert said.startswith("torch.distributed has ended (destroy_process_group) since the model was sharded")
