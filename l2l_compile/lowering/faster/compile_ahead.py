"""Compile graphs for the host before they are used: kernels of one graph compile while the next graph is lowered.

Inductor lowers a graph in Python, passes each kernel to a C++ compiler (a process), and waits for all kernels of the graph
before it returns. Here it does not wait: `begin` returns while the kernels are still being compiled, and `Begun.result` waits
when the graph is needed. The number of compilers that run at once is the number of Inductor's compile threads.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from torch import fx
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture

from l2l_compile.devices.host import HOST
from l2l_compile.lowering.faster import vector_instructions
from l2l_compile.lowering.faster.kernel_files import Kernel, compile_file, in_files, number_of_files
from l2l_compile.lowering.faster.low_priority import give_way
from l2l_compile.lowering.inductor import compile_graph
from l2l_compile.torch_internals.patches import replace

PATIENCE = 2.0  # seconds until progress is shown


class Begun:
    """A graph whose kernels are being compiled."""

    def __init__(self, run: Callable, waits: list[Callable[[], None]]):
        self._run, self._waits = run, waits
        self._error: Exception | None = None
        _unfinished.append(self)

    def result(self) -> Callable:
        """Wait for the kernels, and return the compiled graph. Raises the error of their compilation.

        Also waits for all graphs that were begun earlier: Inductor uses the same kernels for two graphs with equal code.
        """
        while self in _unfinished:
            _unfinished[0]._finish()
            _unfinished.pop(0)
            if not _unfinished:
                vector_instructions.ask_for_the_others()
        if self._error is not None:
            raise self._error
        return self._run

    def _finish(self) -> None:
        try:
            for wait in self._waits:
                wait()
        except Exception as error:  # noqa: BLE001 - raised by `result` of this graph
            self._error = error


_unfinished: list[Begun] = []  # in the order in which they were begun


def begin(module: fx.GraphModule) -> Begun:
    """Lower a functional ATen graph for the host to kernels, as `compile_graph` does, and begin to compile these."""
    if (asking := vector_instructions.ask()) is not None:
        asking.join()
    with _without_waiting() as waits:
        run = compile_graph(module, HOST)
    return Begun(run, waits)


_deferred = threading.local()


@contextmanager
def _without_waiting() -> Iterator[list[Callable[[], None]]]:
    waits: list[Callable[[], None]] = []
    _deferred.waits, _deferred.kernels = waits, []
    try:
        yield waits
    finally:
        _deferred.waits = _deferred.kernels = None


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    """Threads that wait for C++ compilers. Both have a lower priority than the Python thread, which lowers the next graph."""
    return ThreadPoolExecutor(get_compile_threads(), "l2l-compiler", initializer=give_way, initargs=(5,))


os.register_at_fork(after_in_child=_compilers.cache_clear)  # a forked child does not have these threads


def _wait_later() -> None:
    """Replace two functions of Inductor, so that within `_without_waiting` kernels are collected and not waited for."""
    wait, compiles = AsyncCompile._wait_futures, AsyncCompile.cpp_pybinding

    @functools.wraps(compiles)
    def cpp_pybinding(self: AsyncCompile, types: list[str], source: str) -> object:
        kernels = getattr(_deferred, "kernels", None)
        if kernels is None or get_compile_threads() < 2:
            return compiles(self, types, source)
        kernels.append(kernel := Kernel(types, source))
        return LambdaFuture(lambda: kernel.load())

    @functools.wraps(wait)
    def wait_futures(self: AsyncCompile, scope: dict) -> None:
        waits = getattr(_deferred, "waits", None)
        if waits is None:
            wait(self, scope)
            return
        for kernels in in_files(_deferred.kernels, number_of_files(_deferred.kernels, get_compile_threads())):
            compile_file(
                kernels, functools.partial(CppPythonBindingsCodeCache.load_pybinding_async, submit_fn=_compilers().submit)
            )
        _deferred.kernels.clear()
        waits.append(functools.partial(wait, self, scope))

    replace(AsyncCompile, "_wait_futures", wait_futures)
    replace(AsyncCompile, "cpp_pybinding", cpp_pybinding)


_wait_later()


class CompileProgress:
    """A line on stderr that counts compiled graphs, after two seconds, on a terminal or with `L2L_COMPILE_PROGRESS=1`."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._begun = 0.0

    def expect(self, count: int) -> None:
        """Add `count` to the number of graphs that will be compiled."""
        if self._done == self._total:
            self._total = self._done = 0
            self._begun = time.monotonic()
        self._total += count

    def step(self) -> None:
        """Count a compiled graph. Does nothing if all expected graphs are counted already."""
        if self._done == self._total:
            return
        self._done += 1
        wanted = os.environ.get("L2L_COMPILE_PROGRESS", str(int(sys.stderr.isatty()))) == "1"
        if wanted and time.monotonic() - self._begun > PATIENCE:
            end = "\n" if self._done == self._total else ""
            print(f"\rl2l: compiled {self._done} of {self._total} graphs", end=end, file=sys.stderr, flush=True)
