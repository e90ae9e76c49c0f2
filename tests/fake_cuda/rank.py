"""One rank of several, each a process with a GPU of its own. It runs cases on its GPU, and writes what it has asked of CUDA and NCCL.

python tests/fake_cuda/rank.py RANK WORLD FOLDER CASE...
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pool
import steps
import test_global
import test_mean
import test_one_forward_one_back
import test_pipeline_numbers
import test_pipeline_width
import test_replicas
import test_tensor_parallel
import test_without_flush
import torch
import torch.distributed as dist
from pipelines import Case

import lean
from l2l_compile import RankError
from l2l_compile.ranks import collectives
from l2l_compile.ranks.ranks import Ranks
from models import Stack

SECONDS = 200.0  # a rank that takes longer for a case hangs
ON_CUDA = {"device": "cuda"}


def _pipeline(check: Callable, model: str, loops: int | None = 1, **options: Any) -> Callable:
    return lambda rank, world: check(rank, world, Case(model, torch.float64, loops=loops, options=ON_CUDA | options))


def _wide(model: str) -> Callable:
    return lambda rank, world: test_pipeline_width.equal_to_shard(
        rank, world, "shards", None, test_pipeline_width.case(model, options=ON_CUDA)
    )


def collectives_of_devices(rank: int, world: int) -> None:
    """Each collective of the library has the bytes of all ranks; also of dtypes that NCCL does not know."""
    group, device = dist.group.WORLD, torch.device("cuda", rank)

    def mine(dtype: torch.dtype, of: int = rank) -> torch.Tensor:
        return torch.arange(6).add(10 * of).to(dtype)

    def done(work: dist.Work) -> None:
        raise AssertionError("a collective on a device is not waited for")

    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint32, torch.bool):
        whole = torch.zeros(6 * world, dtype=dtype, device=device)
        collectives.all_gather(whole, mine(dtype).to(device), group, done)
        assert whole.cpu().tolist() == [x for r in range(world) for x in mine(dtype, r).tolist()], dtype
    wholes = [torch.zeros(6 * world, device=device) for _ in range(3)]
    collectives.all_gather_each(wholes, [mine(torch.float32).to(device) * (k + 1) for k in range(3)], group, done)
    for k, whole in enumerate(wholes):
        assert whole.cpu().tolist() == [(k + 1) * x for r in range(world) for x in mine(torch.float32, r).tolist()]
    rows = torch.stack([mine(torch.float64) * (r + 1) for r in range(world)]).to(device)
    total = sum(mine(torch.float64, r) for r in range(world))
    assert collectives.sum_to_owners(rows, group, done).cpu().tolist() == (total * (rank + 1)).tolist()
    values = mine(torch.float64).to(device)
    collectives.all_reduce(values, group, done)
    assert values.cpu().tolist() == total.tolist()
    pair = dist.new_group([0, 1])
    if rank < 2:
        sent = mine(torch.int16).to(device)
        assert collectives.message(sent, 1, pair) is None
        assert sent.cpu().tolist() == mine(torch.int16, 1).tolist()


def other_sizes(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3 + rank, device=torch.device("cuda", rank)))
    torch.cuda.synchronize(rank)


def other_collectives(rank: int, world: int) -> None:
    values, whole = torch.ones(4, device=torch.device("cuda", rank)), torch.ones(4 * world, device=torch.device("cuda", rank))
    if rank:
        dist.all_reduce(values)
    else:
        dist.all_gather_into_tensor(whole, values)
    torch.cuda.synchronize(rank)


def the_same_device(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3, device="cuda:0"))


def one_is_held_up(rank: int, world: int) -> None:
    """On rank 1, the first group's collective waits for the third's, which rank 0 comes to behind the second's: all three end."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    first, second, third = groups = [dist.new_group(list(range(world))) for _ in range(3)]
    for group in groups:  # connects it
        dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize(device)
    orders = ([first], [second, third]) if rank == 0 else ([third, first], [second])
    streams, made = [torch.cuda.Stream(device) for _ in orders], []
    for stream, order in zip(streams, orders, strict=True):
        with torch.cuda.stream(stream):
            for group in order:
                made.append(torch.full((2,), rank + 1.0, device=device))
                dist.all_reduce(made[-1], group=group)
    for stream in streams:
        stream.synchronize()
    assert [tensor.tolist() for tensor in made] == [[3.0, 3.0]] * 3


def one_fails(rank: int, world: int) -> None:
    """The last rank fails between two collectives. The others, whose streams wait for it, say so within ten seconds."""
    _, _, step = steps.sharded(Stack(3).double(), world)
    step(test_mean.numbers(rank, 0)).pow(2).mean().backward()
    gather, calls, since = Ranks.gather, [], time.monotonic()

    def failing(self: Ranks, wholes: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and rank == world - 1:
            raise ValueError("the third gather")
        gather(self, wholes)

    Ranks.gather = failing
    try:
        step(test_mean.numbers(rank, 1)).pow(2).mean().backward()
    except (RankError, ValueError) as error:
        assert "the third gather" in str(error)
        assert isinstance(error, RankError if rank < world - 1 else ValueError)
        assert time.monotonic() - since < 10.0
    else:
        raise AssertionError("nothing has failed")
    finally:
        Ranks.gather = gather


CASES: dict[str, Callable[[int, int], Any]] = {
    "collectives": collectives_of_devices,
    "other sizes": other_sizes,
    "other collectives": other_collectives,
    "the same device": the_same_device,
    "one fails": one_fails,
    "one is held up": one_is_held_up,
    "shards": lambda rank, world: test_mean.each_gradient_is_the_mean(rank, world, "odd", {}),
    "shards, stash on the host": lambda rank, world: test_mean.each_gradient_is_the_mean(rank, world, "stack", {"stash": "host"}),
    "steps on shards": test_mean.updates_as_eager_does,
    "rows of all ranks": lambda rank, world: test_global.equals_eager_on_all_rows(rank, world, "convolutions", {}),
    "parallel layers": lambda rank, world: test_tensor_parallel.equals_the_whole_model(rank, world, "layers", {}),
    "parallel layers of shards": test_tensor_parallel.equals_the_mean_of_the_rows,
    "replicas": lambda rank, world: test_replicas.trains_as_eager_on_all_batches(rank, world, "stack", "in_backward"),
    "replicas, clipped": lambda rank, world: test_replicas.trains_as_eager_on_all_batches(rank, world, "odd", "in_forward"),
    "pipeline": _pipeline(test_pipeline_numbers.equal_bits, "supervised"),
    "pipeline, loops": _pipeline(test_pipeline_numbers.equal_bits, "gated", loops=None, update="in_backward"),
    "by turns": _pipeline(test_one_forward_one_back.equal_bits, "stepped", update="in_forward"),
    "without a flush": _pipeline(test_without_flush.equal_bits, "stepped", micro_batches=4),
    "pipeline of shards": _wide("stepped"),
}


class Runtime:
    """What this process has asked of CUDA and NCCL."""

    def __init__(self) -> None:
        self.process = ctypes.CDLL(None)
        for name in ("fake_report", "fake_nccl_log", "fake_streams", "fake_nccl_waiting"):
            getattr(self.process, name).restype = ctypes.c_char_p
        self._seen = 0

    def report(self) -> dict[str, Any]:
        """Since the last report. `calls` has the collectives in the order of their launches, each with its communicator."""
        lines = self.process.fake_report().decode().splitlines()
        calls = self.process.fake_nccl_log().decode().splitlines()
        found = {
            "violations": [line for line in lines if "=" not in line],
            "counts": [line.rsplit("=", 1)[0] for line in lines if "=" in line],
            "calls": [call.split(" ", 1) for call in calls[self._seen :]],
            "devices": [device for device in range(32) if self.process.fake_contexts() >> device & 1],
        }
        self._seen = len(calls)
        self.process.fake_reset()
        return found

    def give_up(self, file: TextIO) -> None:
        """Write where the threads, the streams and the collectives of a rank that hangs are, and end its process."""
        faulthandler.dump_traceback(file)
        print(self.process.fake_streams().decode(), self.process.fake_nccl_waiting().decode(), file=file, flush=True)
        os._exit(1)


def run(name: str, rank: int, world: int, store: str) -> None:
    """One case, in process groups of its own."""
    torch.manual_seed(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        CASES[name](rank, world)
        pool.meet()
    finally:
        dist.destroy_process_group()
        lean.reset()
        pool.forget_meshes()
        gc.collect()


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    lean.settle()
    steps.OPTIONS |= ON_CUDA
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
    runtime, found = Runtime(), {}
    runtime.process.fake_set_lazy(int(os.environ["FAKE_CUDA_LAZY"]))
    for number, name in enumerate(names):
        error = ""
        with (folder / f"hangs.{rank}").open("w") as file:
            timer = threading.Timer(SECONDS, runtime.give_up, (file,))
            timer.start()
            try:
                run(name, rank, world, str(folder / f"store.{number}"))
            except BaseException:  # noqa: BLE001 - the test shows it
                error = traceback.format_exc()
            timer.cancel()
        found[name] = runtime.report() | {"error": error}
        if error:
            break
    (folder / f"found.{rank}").write_text(json.dumps(found))
    os._exit(0)  # a rank that has failed may have left collectives behind


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
