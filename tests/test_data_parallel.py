"""`DistributedDataParallel` around a compiled model, or compiled itself: whole programs, and the mean of all gradients."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import l2l_compile
from models import Stack, rows

PROCESSES = 2
OPTIONS = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}


def compiled_then_wrapped(model, options, **settings):
    inner = torch.compile(model, backend="l2l", options=options)
    return DistributedDataParallel(inner, **settings), inner


def wrapped_then_compiled(model, options, **settings):
    outer = torch.compile(DistributedDataParallel(model, **settings), backend="l2l", options=options)
    return outer, outer


def compiled_in_place(model, options, **settings):
    model.compile(backend="l2l", options=options)
    return DistributedDataParallel(model, **settings), model


FORMS = (compiled_then_wrapped, wrapped_then_compiled, compiled_in_place)
SETTINGS = ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4})


def batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    return rows(6)


def gradients_are_averaged(rank: int) -> None:
    for form in FORMS:
        for settings in SETTINGS:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Stack(3).double()
            reference = copy.deepcopy(model)
            step, compiled = form(model, OPTIONS, **settings)
            for number in range(2):
                model.zero_grad()
                reference.zero_grad()
                step(batch(rank, number)).pow(2).mean().backward()
                (sum(reference(batch(r, number)).pow(2).mean() for r in range(PROCESSES)) / PROCESSES).backward()
                for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(
                        ours.grad, theirs.grad, rtol=1e-12, atol=1e-14, msg=f"{form.__name__} {settings} {name}"
                    )
            (program,) = l2l_compile.programs(compiled)
            assert len(program.segments) == 5, (form.__name__, settings, len(program.segments))


def overlapped_updates_are_refused(rank: int) -> None:
    for form in FORMS:
        for update in ("in_backward", "in_forward"):
            torch._dynamo.reset()
            model = Stack(3)
            options = {**OPTIONS, "optimizer": torch.optim.SGD(model.parameters()), "update": update}
            step, _ = form(model, options)
            with pytest.raises(
                l2l_compile.L2LError, match=f"update='{update}' under DistributedDataParallel.*Use update='at_step'"
            ):
                step(batch(rank, 0).float())


def in_a_process(rank: int, folder: Path) -> None:
    warnings.simplefilter("error", UserWarning)  # a part that is left uncompiled
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(str(folder / "store"), PROCESSES)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    try:
        gradients_are_averaged(rank)
        overlapped_updates_are_refused(rank)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_in_two_processes(launcher, tmp_path):
    """Both checks in the same processes, which are forked from one that has imported everything."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import torch.multiprocessing
from test_data_parallel import PROCESSES, in_a_process
torch.set_num_threads(1)
torch.multiprocessing.start_processes(in_a_process, (Path({str(tmp_path)!r}),), nprocs=PROCESSES, start_method="fork")
"""
    done = launcher.run(script, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]
