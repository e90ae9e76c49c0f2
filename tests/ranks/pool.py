"""Processes of `torch.distributed` that run one check after another: they are forked from one that has compiled a model."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

SIZE = 4
FOLDERS = (Path(__file__).parent, Path(__file__).parents[1])

_SCRIPT = """
import os, sys
import networkx, sympy, torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx, torch.distributed.tensor
import l2l_compile.backend
sys.path[:0] = {folders}
import lean, pool
lean.settle()
lean.warm()
pool.warm()
ranks = {{}}
missing = list(range({size}))
while True:
    for rank in missing:
        child = os.fork()
        if not child:
            pool.work(rank, {address!r})
            os._exit(0)
        ranks[child] = rank
    missing = [ranks.pop(os.wait()[0])]
"""


class Pool:
    """`run` has a function of a test module called in several processes, with its rank and the number of ranks."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.listener = Listener(str(folder / "pool"))
        script = _SCRIPT.format(folders=list(map(str, FOLDERS)), size=SIZE, address=self.listener.address)
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], start_new_session=True)
        self.workers: dict[int, Connection] = {}
        self._meet(SIZE)

    def _meet(self, count: int) -> None:
        for _ in range(count):
            while not wait([self.listener._listener._socket], timeout=1.0):
                assert self.alive, "the processes of the ranks have ended before they called: see their error above"
            connection = self.listener.accept()
            self.workers[connection.recv()] = connection

    def run(self, check: Callable, *arguments: Any, world: int = 2, seconds: int = 100, killed: int | None = None) -> list[Any]:
        """What the function returns in each process. Raises `AssertionError` with the traceback of the first that failed.

        `killed` is a rank that does not come to its end, and returns None; other processes take the place of all ranks behind it.
        """
        self.count += 1
        store = str(self.folder / f"store_{self.count}")
        chosen = [self.workers[rank] for rank in range(world)]
        for connection in chosen:
            connection.send((check.__module__, check.__qualname__, world, store, seconds, arguments, killed is None))
        found: list[Any] = []
        for rank, connection in enumerate(chosen):
            if not connection.poll(seconds):
                self.close()
                stack = Path(f"{store}.{rank}").read_text()
                raise AssertionError(f"rank {rank} of '{check.__qualname__}' has not ended after {seconds} s:\n{stack}")
            found.append(_ended(connection) if rank == killed else connection.recv())
        if killed is not None:
            for connection in chosen:
                connection.close()
            self._meet(world)
        failed = [text for text, _ in found if text]
        if failed:
            raise AssertionError("\n".join(failed))
        return [result for _, result in found]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)  # a rank may hang
        self.process.wait()
        self.listener.close()
        for connection in self.workers.values():
            connection.close()


def _ended(connection: Connection) -> tuple[str, None]:
    """The result of a process that ends before it sends one."""
    try:
        connection.recv()
    except (EOFError, ConnectionResetError):
        return "", None
    return "a rank that was to be killed has come to its end", None


def warm() -> None:
    """Processes that are forked from this one have what the tests import."""
    import importlib

    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    import lean

    for file in sorted(FOLDERS[0].glob("test_*.py")):
        importlib.import_module(file.stem)
    lean.freeze()


def work(rank: int, address: str) -> None:
    """The loop of a process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection = Client(address)
    connection.send(rank)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", _run(rank, *task)))
        except BaseException:  # noqa: BLE001 - the test shows it
            connection.send((f"rank {rank}:\n{traceback.format_exc()}", None))


def _run(rank: int, module: str, name: str, world: int, store: str, seconds: int, arguments: tuple, all_end: bool) -> Any:
    with open(f"{store}.{rank}", "w") as file:
        faulthandler.dump_traceback_later(0.9 * seconds, file=file)  # where a rank hangs
        try:
            return _call(rank, module, name, world, store, arguments, all_end)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _call(rank: int, module: str, name: str, world: int, store: str, arguments: tuple, all_end: bool) -> Any:
    import importlib

    import torch
    import torch.distributed as dist

    import lean
    from l2l_compile import session
    from l2l_compile.devices.watched import watch

    if not hasattr(session, "plain_open"):
        session.plain_open = session.open_device
        session.open_device = lambda options: watch(session.plain_open(options))
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        result = getattr(importlib.import_module(module), name)(rank, world, *arguments)
        if all_end:  # a rank that destroys its process group closes the connections of another that still makes one
            meet()
        return result
    finally:
        dist.destroy_process_group()
        lean.reset()
        forget_meshes()
        gc.collect()  # models in cycles; process groups end with them, and with those three threads each


def meet() -> None:
    """Wait for the other ranks, for ten seconds: one of them may have failed."""
    import torch.distributed as dist

    try:
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    except RuntimeError:
        pass


def forget_meshes() -> None:
    """DTensor keeps what it has found for each mesh, and a mesh keeps its process group."""
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
