"""Graphs are compiled by workers, side by side; whatever happens to a worker, the step is right."""
from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch
from torch._inductor.utils import fresh_cache

import l2l_compile
import l2l_compile.codes
from l2l_compile import compile_ahead
from models import Stack, assert_parity, rows


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    l2l_compile.codes.store.clear()
    with fresh_cache():
        yield


@pytest.fixture
def sent(monkeypatch):
    """The jobs that were given to workers."""
    jobs = []
    original = compile_ahead.submit

    def submit(module):
        jobs.append(original(module))
        return jobs[-1]

    monkeypatch.setattr(compile_ahead, "submit", submit)
    return jobs


def step() -> None:
    torch.manual_seed(0)
    assert_parity(Stack(2).double(), rows(6), block_compiler="inductor")


FIRST_STEP = """
import torch, l2l_compile
from torch._dynamo.utils import counters
from l2l_compile import compile_ahead
jobs, submit = [], compile_ahead.submit
compile_ahead.submit = lambda module: jobs.append(submit(module)) or jobs[-1]
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)))
torch.compile(model, backend="l2l", options={"micro_batches": 2, "device": "cpu"})(torch.randn(4, 8)).sum().backward()
assert len(jobs) > 1 and all(job.exception() is None for job in jobs), jobs
found = counters["aot_autograd"]
assert found["autograd_cache_hit"] == found["total"] == len(jobs), (len(jobs), dict(found))
"""


@pytest.mark.skipif(torch._inductor.config.compile_threads < 2, reason="Inductor has no workers on one core")
def test_this_process_finds_what_workers_have_compiled(tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "error:backend 'l2l'", "-c", FIRST_STEP], env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert not run.returncode, run.stderr[-2000:]


def test_what_the_caches_hold_is_not_sent(sent):
    step()
    del sent[:]
    torch._dynamo.reset()
    l2l_compile.codes.store.clear()
    step()
    assert sent and all(job is None for job in sent)


def test_a_worker_that_fails_costs_time_alone(monkeypatch):
    def submit(module):
        job = Future()
        job.set_exception(OSError("the worker was killed"))
        return job

    monkeypatch.setattr(compile_ahead, "submit", submit)
    step()


def test_work_that_is_done_twice_is_said(monkeypatch):
    def submit(module):
        job = Future()
        job.set_result(None)
        return job

    monkeypatch.setattr(compile_ahead, "submit", submit)
    with pytest.warns(UserWarning, match="Inductor's caches do not give it to this process"):
        step()


@pytest.mark.parametrize("shown", ["0", "1"])
def test_progress(monkeypatch, capsys, shown):
    monkeypatch.setenv("L2L_COMPILE_PROGRESS", shown)
    monkeypatch.setattr(compile_ahead, "PATIENCE", -1.0)
    progress = compile_ahead.Progress()
    progress.expect(2)
    for _ in range(3):
        progress.step()
    lines = "\rl2l: compiled 1 of 2 graphs\rl2l: compiled 2 of 2 graphs\n"
    assert capsys.readouterr().err == (lines if shown == "1" else "")
