"""Compile graphs on Inductor's worker processes, side by side, before they are needed.

A worker compiles a graph and leaves the result in Inductor's caches on disk; this process then compiles the same graph and
finds it there, which takes a tenth of a second. Nothing depends on the worker: if it fails, the graph is compiled here,
and whatever is wrong with it is raised here. Graphs that the caches are known to hold are not sent.
"""
from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .inductor import compile_graph

_log = logging.getLogger(__name__)
_HOST = torch.device("cpu")
PATIENCE = 2.0  # seconds until progress is shown


def submit(module: fx.GraphModule) -> Future | None:
    """Have a worker compile a graph for the host. None if there are no workers, or the caches have it already."""
    if config.compile_threads < 2 or not config.fx_graph_cache or config.force_disable_caches or _mark(module).exists():
        return None
    pool = AsyncCompile.process_pool()
    if not isinstance(pool, SubprocPool):  # forked from this process, threads and all
        return None
    try:
        data = GraphPickler.dumps(module, Options(ops_filter=None))
    except Exception as error:  # noqa: BLE001 - an argument that cannot be pickled: the graph is compiled here
        _log.debug("a graph cannot be sent to a worker: %s", error)
        return None
    return pool.submit(functools.partial(_compile, data, config.save_config_portable(), cache_dir(), torch.get_num_threads()))


def wait(job: Future) -> bool:
    """Until the worker is done: whether it has compiled the graph."""
    try:
        job.result()
        return True
    except Exception as error:  # noqa: BLE001 - compiled here instead, where the same error is raised if it is one of the graph
        _log.debug("a worker could not compile a graph: %s", error)
        return False


def found() -> int:
    """How often this process has found compiled code in Inductor's caches."""
    return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


def compiled(module: fx.GraphModule) -> None:
    """Remember on disk that Inductor's caches hold this graph."""
    mark = _mark(module)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _mark(module: fx.GraphModule) -> Path:
    operands = [str(node.meta.get("val")) for node in module.graph.find_nodes(op="placeholder")]
    text = "\n".join([torch.__version__, str(sys.version_info), *operands, str(module.graph)])
    return Path(cache_dir()) / "l2l_compile" / hashlib.sha256(text.encode()).hexdigest()


def _compile(data: bytes, settings: dict, cache: str, threads: int) -> None:
    """In a worker: compile a graph as the process that sent it would."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(threads)
    with config.patch({**settings, "compile_threads": 1}):
        compile_graph(GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)), _HOST)


class Progress:
    """A line on stderr that counts compiled graphs, after two seconds, on a terminal or with `L2L_COMPILE_PROGRESS=1`."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._begun = 0.0

    def expect(self, count: int) -> None:
        """So many graphs more are going to be compiled."""
        if self._done == self._total:
            self._total = self._done = 0
            self._begun = time.monotonic()
        self._total += count

    def step(self) -> None:
        """A graph is compiled; it may be one that was not expected."""
        if self._done == self._total:
            return
        self._done += 1
        wanted = os.environ.get("L2L_COMPILE_PROGRESS", str(int(sys.stderr.isatty()))) == "1"
        if wanted and time.monotonic() - self._begun > PATIENCE:
            end = "\n" if self._done == self._total else ""
            print(f"\rl2l: compiled {self._done} of {self._total} graphs", end=end, file=sys.stderr, flush=True)
