"""Processes of `multiprocessing` that end with turns in flight: behind an error, they tell the others of it, and go back with nothing."""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import Case, UShape
from test_without_flush import UNFLUSHED
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import _wrap

import l2l_compile

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

_SCRIPT = """
import os, socket, sys
sys.path[:0] = {folders}
with socket.create_server(("localhost", 0)) as free:
    port = free.getsockname()[1]
for rank in range(2):
    if not os.fork():
        os.dup2(os.open(f"{folder}/stderr_{{rank}}", os.O_WRONLY | os.O_CREAT), 2)
        import test_processes_end
        test_processes_end.begin(rank, port, {folder!r}, {how!r})
os.wait()
os.wait()
os._exit(0)
"""


def begin(rank: int, port: int, folder: str, how: str) -> None:
    """As `multiprocessing` runs a process that it has started: a new one would first import for seconds."""
    process = get_context("spawn").Process(target=train, args=(rank, port, how))
    if how == "spawned":
        process = get_context("spawn").Process(target=_wrap, args=(train, rank, (port, how), f"{folder}/error_{rank}"))
    code = process._bootstrap()
    if how == "forked":
        os._exit(code)
    sys.exit(code)


def train(rank: int, port: int, how: str) -> None:
    """Four steps; rank 0, which holds the store, fails behind the second one, or ends there."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port, 2, is_master=not rank), rank=rank, world_size=2)
    model, case = UShape(), Case("u_shape")
    l2l_compile.pipeline(model, init_device_mesh("cpu", (2,)), case.batch(0), loops=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", "optimizer": optimizer}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options={**options, **UNFLUSHED})
    for step in range(4):
        if (rank, step) == (0, 2):
            if how == "returned":
                return
            raise ValueError("a bad sample")
        compiled(**case.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def printed(launcher, tmp_path):
    """What each rank prints if rank 0 ends in this way."""

    def run(how: str) -> list[str]:
        here = Path(__file__).parent
        launcher.run(_SCRIPT.format(folders=[str(here), str(here.parent)], folder=str(tmp_path), how=how))
        return ["".join(file.read_text(errors="replace") for file in tmp_path.glob(f"*_{rank}")) for rank in range(2)]

    return run


@pytest.mark.parametrize("how", ["raised", "spawned", "forked"])
@pytest.mark.slow(but="raised")
def test_an_error_of_a_process_is_told_to_the_others(printed, how):
    own, other = printed(how)
    assert "RankError: rank 0 ended: ValueError: a bad sample" in other and "in flight" not in own + other


@pytest.mark.slow
def test_a_process_that_ends_with_turns_in_flight_is_named(printed):
    own, other = printed("returned")
    assert (
        "rank 0: goes back with what forward 2 has left in flight, since its process or its process groups end, after 2" in other
    )
    assert "rank 1: begins forward 3, to train" in other and "Error" not in own
