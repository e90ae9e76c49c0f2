"""A rank that fails, ends or takes another path: every process ends within 10 s, with a sentence that says which rank and why."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from steps import OPTIONS, sharded
from test_tensor_parallel import Layers, parallel_layers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.ranks import watch
from models import Stack

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

SECONDS = 10.0
PATIENCE = 2.0  # a third of what it is for users: a test waits for it

_SCRIPT = """
import json, os, signal, sys, time
sys.path[:0] = {folders}
folder, world = {folder!r}, {world}
children = []
for rank in range(world):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.dup2(os.open(f"{{folder}}/stderr_{{rank}}", os.O_WRONLY | os.O_CREAT), 2)
        import test_ranks_that_fail
        test_ranks_that_fail.train(rank, world, folder, {how!r})
        break
    children.append(child)
else:
    signal.alarm(0)
    ended, since = {{}}, time.time()
    while len(ended) < world and time.time() - since < 45:
        for rank, child in enumerate(children):
            if rank not in ended and os.waitpid(child, os.WNOHANG)[0]:
                ended[rank] = time.time()
        time.sleep(0.02)
        if len(ended) == world - 1 and {how!r}.startswith("stop"):
            os.kill(children[1], signal.SIGKILL)
    for rank, child in enumerate(children):
        if rank not in ended:
            os.kill(child, signal.SIGKILL)
    with open(f"{{folder}}/ended", "w") as file:
        json.dump(ended, file)
    os._exit(0)  # the ranks' ends are looked at, not that of this process
"""


class Failing:
    """Lets a rank fail at a place."""

    def __init__(self, folder: str, how: str):
        self.folder = folder
        self.what, _, self.where = how.partition(" ")
        self.now = False

    def mark(self) -> None:
        """The failure begins."""
        Path(f"{self.folder}/failed").write_text(str(time.time()))

    def fail(self) -> None:
        self.mark()
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("no more data")

    def around(self, place: str, call):
        """A function that fails if it is time for it, at this place."""

        def do(*args, **kwargs):
            if self.now and self.where == place:
                self.fail()
            return call(*args, **kwargs)

        return do


def train(rank: int, world: int, folder: str, how: str) -> None:
    """Three steps; rank 1 fails in the second one, as `how` says."""
    from l2l_compile.host.updates.in_backward import UpdatesInBackward
    from l2l_compile.ir import nodes
    from l2l_compile.ranks import collectives, watch
    from l2l_compile.runtime import executor

    watch.PATIENCE = PATIENCE
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    model = MODELS.get(how, sharded_alone)(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    behind_the_device = {"optimizer": optimizer, "update": "in_backward"} if MODELS.get(how) is not shared_alone else {}
    step = torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **behind_the_device})
    failing = Failing(folder, how)
    for node in (nodes.forward, nodes.backward):
        executor.HANDLERS[node] = failing.around(node.__name__, executor.HANDLERS[node])
    collectives.all_reduce = failing.around("sum", collectives.all_reduce)
    UpdatesInBackward._apply = failing.around("update", UpdatesInBackward._apply)
    dcp.FileSystemWriter.write_data = failing.around("saving", dcp.FileSystemWriter.write_data)
    failing.model = model
    for number in range(3):
        failing.now = (rank, number) == (1, 1)
        if failing.now and failing.what == "ends":
            failing.mark()
            return
        one_step(step, optimizer, failing)


def sharded_alone(world: int) -> torch.nn.Module:
    return l2l_compile.shard(Stack(1), init_device_mesh("cpu", (world,)))


def shared(world: int) -> torch.nn.Module:
    """A model of parallel layers that all ranks share."""
    model, mesh = Layers(1), init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    parallel_layers(model, mesh["tp"])
    return l2l_compile.shard(model, mesh)


def shared_alone(world: int) -> torch.nn.Module:
    """As above, without `shard`."""
    model = Layers(1)
    parallel_layers(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    return model


MODELS = {"kill sum": shared, "stop sum": shared_alone, "raise sum": shared}


def one_step(step, optimizer, failing: Failing) -> None:
    where = failing.where if failing.now else ""
    if where == "loop":
        failing.fail()
    if where in ("rows", "a backward", "a step"):
        failing.mark()
    loss = step(torch.randn(0 if where == "rows" else 4, 5)).pow(2).mean()
    if where != "a backward":
        loss.backward()
    if where not in ("a backward", "a step"):
        optimizer.step()
    if where != "a step":
        optimizer.zero_grad()
    if failing.where == "saving":
        model_state, optimizer_state = get_state_dict(failing.model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{failing.folder}/checkpoint")


@dataclass(frozen=True)
class Ended:
    """Seconds between the failure and the end of each process, and what each has printed."""

    seconds: dict[int, float]
    printed: list[str]


def ends(launcher, folder: Path, how: str, world: int) -> Ended:
    here = Path(__file__).parent
    script = _SCRIPT.format(folders=[str(here), str(here.parent)], folder=str(folder), world=world, how=how)
    launcher.run(script, seconds=80)
    since = float((folder / "failed").read_text())
    ended = {int(rank): end - since for rank, end in json.loads((folder / "ended").read_text()).items()}
    return Ended(ended, [(folder / f"stderr_{rank}").read_text() for rank in range(world)])


CASES = {
    "kill forward": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "kill backward": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "kill update": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "kill saving": "Check the logs of the remote worker",  # an error of PyTorch, whose collectives these are
    "stop forward": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "kill sum": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "stop sum": "rank 1 does not answer since 2 s: it was killed, or hangs",
    "raise sum": "rank 1 failed: ValueError: no more data",
    "raise loop": "rank 1 ended: ValueError: no more data",
    "raise backward": "rank 1 failed: ValueError: no more data",
    "ends early": "rank 1 has ended, and this rank waits for it",
    "skip a backward": "the ranks have taken different paths",
    "skip a step": "the ranks have taken different paths",
    "no rows": "rank 1 has a batch of no rows",
}


@pytest.mark.parametrize("how", CASES)
@pytest.mark.slow(but=("kill backward", "raise loop", "skip a step", "no rows"))
def test_every_process_ends_with_a_sentence(launcher, tmp_path, how):
    world = 3 if how == "stop forward" else 2
    found = ends(launcher, tmp_path, how, world)
    for rank in {0, world - 1} - {1}:
        assert CASES[how] in found.printed[rank], (rank, found.printed[rank][-2000:])
        assert found.seconds[rank] < SECONDS, (rank, found.seconds)


def test_a_store_that_is_gone_names_its_process():
    store = dist.TCPStore("localhost", 0, is_master=True)
    found = watch.Watch(dist.TCPStore("localhost", store.port, is_master=False), rank=1, size=2)
    del store
    until = time.monotonic() + SECONDS
    while found.failure is None and time.monotonic() < until:
        time.sleep(0.05)
    assert "the process that holds it, most often that of rank 0, has ended. Its own output says why" in found.failure.text


def late_ranks_are_named(rank, world):
    step = sharded(Stack(2), world)[-1]
    step(torch.randn(4, 5))
    with warnings.catch_warnings(record=True) as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "LATE", 0.5)
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(1.5)
        step(torch.randn(4, 5))
    return [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]


def test_a_rank_that_is_late_is_named_by_those_that_wait(ranks):
    (waits,), nothing = ranks.run(late_ranks_are_named)
    assert waits.startswith(
        "rank 0 begins forward 2, to train, after 0 optimizer steps, and has waited 0 s for rank 1, alive but"
    )
    assert not nothing
