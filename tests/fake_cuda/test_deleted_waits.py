"""Each wait of the executor and of the host, deleted, shows on the CUDA device: in numbers, or as a violation."""

from __future__ import annotations

import functools

import pytest
import torch

from l2l_compile.devices.cuda import CudaDevice
from race_cases import CASES, Run, is_missed, same, slow_worker

NOT_MISSED = {  # a case, its wait and a lane, and what waits as well
    ("a step", "host.server.ParameterServer._collect: self.device.wait_on_host(gradients.event)", "d2h"):
        "nobody reads these gradients before the end of the step; see `gradients are read`",
    ("no gradient", "runtime.executor._release: compute.wait(x.event)", "h2d"):
        "the next copy into that slab is an operation of the same stream",
    ("several forwards", "runtime.stashes.Stashes._move: self.device.synchronize()", "h2d"):
        "compute waits for the weights, which come in the same stream",
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory of the device is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_deleted_wait_shows_on_the_cuda_device(computing, case):
    run = Run(case, CudaDevice(torch.device("cuda", 0)))
    expected = run()
    for name, lanes in case.waits.items():
        for lane in lanes.split():
            if lane in run.session.device.lanes:
                _slow(computing, run.session, lane, 0.0)
                assert same(run(), expected) and computing.violations == []
            if (case.name, name, lane) not in NOT_MISSED:
                slowed = functools.partial(_slow, computing, run.session, lane)
                missed = is_missed(name, run, expected, slowed) or computing.violations
                assert missed, f"nobody misses {name}, with {lane} slow"
            computing.reset()


def _slow(runtime, session, lane, pause):
    """A lane of the device does its work as late as CUDA allows, or one of the host pauses; all others are fast."""
    slow_worker(session, lane, pause)
    if lane in session.device.lanes:
        runtime.set_late(session.device.lanes[lane].stream)
    else:
        runtime.set_lazy(False)
