"""Kernels are compiled side by side, whatever graph they are of; what fails is raised for the one who asks."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

import l2l_compile
import l2l_compile.backend
import l2l_compile.lowering.code_cache
from l2l_compile.frontend.capture import capture
from l2l_compile.lowering.faster import compile_ahead, vector_instructions
from models import Stack, assert_parity, rows

several_compilers = pytest.mark.skipif(torch._inductor.config.compile_threads < 2, reason="Inductor has no threads on one core")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    l2l_compile.lowering.code_cache.store.clear()


@pytest.fixture
def no_kernels():
    """Inductor has to compile each kernel anew."""
    with fresh_cache():
        yield


def step() -> None:
    torch.manual_seed(0)
    assert_parity(Stack(2).double(), rows(6), block_compiler="inductor")


@several_compilers
@pytest.mark.slow
def test_no_graph_waits_for_the_kernels_of_another(monkeypatch, no_kernels):
    begun, done, asked = [], [], threading.Event()
    begin, result, submit = compile_ahead.begin, compile_ahead.Begun.result, compile_ahead._compilers().submit

    def held_back(task):
        def compile_later():
            if not asked.wait(60):
                raise TimeoutError("a graph waits for its kernels before it is asked for")
            return task()

        return submit(compile_later)

    def result_of(self):
        asked.set()
        done.append(result(self))
        return done[-1]

    monkeypatch.setattr(compile_ahead, "_compilers", lambda: SimpleNamespace(submit=held_back))
    monkeypatch.setattr(compile_ahead, "begin", lambda graph: begun.append(graph) or begin(graph))
    monkeypatch.setattr(compile_ahead.Begun, "result", result_of)
    step()
    assert len(begun) == len(done) > 1
    assert not compile_ahead._unfinished


@several_compilers
def test_a_kernel_that_does_not_compile_is_an_error_of_its_block(monkeypatch, no_kernels):
    def no_compiler(task):
        def fail():
            raise OSError("g++: out of memory")

        return submit(fail)

    submit = compile_ahead._compilers().submit
    with monkeypatch.context() as broken:
        broken.setattr(compile_ahead, "_compilers", lambda: SimpleNamespace(submit=no_compiler))
        broken.setattr(AsyncCompile, "submit", staticmethod(no_compiler))
        with pytest.raises(
            l2l_compile.LoweringError, match="block_1 cannot be compiled by Inductor: .*OSError: g.*block_compiler='eager'"
        ):
            step()


def test_a_graph_that_cannot_be_begun_is_compiled_on_demand(monkeypatch):
    def begin(graph):
        raise OSError("not now")

    monkeypatch.setattr(compile_ahead, "begin", begin)
    step()


@pytest.mark.parametrize("options, asked", [({}, True), ({"block_compiler": "eager"}, False)])
def test_the_compiler_is_asked_while_dynamo_looks_at_the_model(monkeypatch, options, asked):
    calls = []
    monkeypatch.setattr(vector_instructions, "ask", lambda: calls.append(len(calls)))
    model, x = Stack(2).double(), rows(6)
    options = {"device": "cpu", **options}
    l2l_compile.explain(model, options)(x)
    assert not calls
    compiled = torch.compile(model, backend="l2l", options=options)
    monkeypatch.setattr(
        l2l_compile.backend, "capture", lambda gm: pytest.fail("asked too late") if bool(calls) != asked else capture(gm)
    )
    compiled(x)


@pytest.mark.parametrize("shown", ["0", "1"])
def test_progress(monkeypatch, capsys, shown):
    monkeypatch.setenv("L2L_COMPILE_PROGRESS", shown)
    monkeypatch.setattr(compile_ahead, "PATIENCE", -1.0)
    progress = compile_ahead.CompileProgress()
    progress.expect(2)
    for _ in range(3):
        progress.step()
    lines = "\rl2l: compiled 1 of 2 graphs\rl2l: compiled 2 of 2 graphs\n"
    assert capsys.readouterr().err == (lines if shown == "1" else "")


@several_compilers
def test_compilers_work_where_no_priority_can_be_set(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    compile_ahead._compilers.cache_clear()
    try:
        assert compile_ahead._compilers().submit(lambda: 3).result(30) == 3
    finally:
        compile_ahead._compilers.cache_clear()


@several_compilers
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_has_compilers_of_its_own():
    compile_ahead._compilers().submit(int).result()
    child = os.fork()
    if child == 0:
        try:
            os._exit(compile_ahead._compilers().submit(lambda: 7).result(30))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
