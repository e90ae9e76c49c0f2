"""Graphs are compiled by workers, side by side; whatever happens to a worker, the step is right."""
from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from torch._dynamo.utils import counters
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


@pytest.mark.skipif(torch._inductor.config.compile_threads < 2, reason="Inductor has no workers on one core")
def test_this_process_finds_what_workers_have_compiled(sent):
    counters.clear()
    step()
    assert len(sent) > 1 and all(job.exception() is None for job in sent)
    assert counters["aot_autograd"]["autograd_cache_hit"] == len(sent)
    assert not counters["aot_autograd"]["autograd_cache_miss"]


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
